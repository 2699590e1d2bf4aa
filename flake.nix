# Every family of this repository, from one lock. A release is built from the family's own flake, which has the same.
#
#   nix build .#normalization    every variant of a family that this platform can build
#   nix build .#all              those of every family, side by side
#   nix develop                  a shell with the kernel-builder command
#   nix develop .#normalization  a shell with what compiles the family
#   nix flake check              builds one variant of each family and backend
#   nix fmt                      formats the Nix files
#
# To move to another kernel-builder, write its revision here and in common/flake.nix, then
#
#   nix flake lock && cp flake.lock common/ && ./dev vendor
{
  description = "ruDNN kernels";

  inputs.kernel-builder.url = "github:huggingface/kernels/8ac69fc542a4306eade0759ef7c45b4f2ae57df0";

  outputs =
    { self, kernel-builder }:
    let
      inherit (kernel-builder.inputs.nixpkgs) legacyPackages lib;

      forEachSystem = lib.genAttrs [
        "x86_64-linux"
        "aarch64-linux"
        "aarch64-darwin"
      ];

      isFamily =
        name: type: type == "directory" && builtins.pathExists (./. + "/${name}/build.toml");
      directories = lib.filterAttrs isFamily (builtins.readDir ./.);

      families = lib.mapAttrs (
        name: _:
        kernel-builder.lib.genKernelFlakeOutputs {
          inherit self;
          path = ./. + "/${name}";
        }
      ) directories;
    in
    {
      packages = forEachSystem (
        system:
        let
          bundles = lib.mapAttrs (_: family: family.packages.${system}.bundle) families;
          all = legacyPackages.${system}.linkFarm "rudnn-kernels" bundles;
        in
        bundles
        // {
          inherit all;
          default = all;
        }
      );

      devShells = forEachSystem (
        system:
        lib.mapAttrs (_: family: family.devShells.${system}.default) families
        // {
          default = legacyPackages.${system}.mkShell {
            packages = [ kernel-builder.packages.${system}.kernel-builder ];
          };
        }
      );

      checks = forEachSystem (
        system: lib.mapAttrs (_: family: family.packages.${system}.ci) families
      );

      formatter = forEachSystem (system: legacyPackages.${system}.nixfmt-tree);
    };
}
