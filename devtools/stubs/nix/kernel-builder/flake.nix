# Stands in for github:huggingface/kernels where nothing can be fetched: what the flakes of this repository ask of it,
# as derivations that tell by their name what they would build.
{
  inputs.nixpkgs.url = "path:../nixpkgs";

  outputs =
    { self, nixpkgs }:
    let
      forEachSystem = nixpkgs.lib.genAttrs [
        "x86_64-linux"
        "aarch64-linux"
        "aarch64-darwin"
      ];
    in
    {
      lib.genKernelFlakeOutputs =
        {
          self,
          path,
          doGetKernelCheck ? true,
          pythonCheckInputs ? _: [ ],
          pythonNativeCheckInputs ? _: [ ],
          torchVersions ? versions: versions,
        }:
        let
          inherit ((builtins.fromTOML (builtins.readFile (path + "/build.toml"))).general) name;
        in
        {
          packages = forEachSystem (system: {
            bundle = nixpkgs.lib.stub "${name}-bundle" system;
            ci = nixpkgs.lib.stub "${name}-ci" system;
            default = nixpkgs.lib.stub "${name}-bundle" system;
          });
          devShells = forEachSystem (system: {
            default = nixpkgs.lib.stub "${name}-shell" system;
            test = nixpkgs.lib.stub "${name}-test-shell" system;
          });
        };

      packages = forEachSystem (system: {
        kernel-builder = nixpkgs.lib.stub "kernel-builder" system;
      });
    };
}
