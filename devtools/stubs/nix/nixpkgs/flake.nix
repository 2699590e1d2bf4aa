# Stands in for nixpkgs, as far as the flakes of this repository use it.
{
  outputs =
    { self }:
    let
      genAttrs =
        names: value:
        builtins.listToAttrs (
          map (name: {
            inherit name;
            value = value name;
          }) names
        );

      stub =
        name: system:
        derivation {
          inherit system;
          name = "${name}-${system}";
          builder = "/none";
        };
    in
    {
      lib = {
        inherit genAttrs stub;
        inherit (builtins) mapAttrs;
        filterAttrs =
          keep: set:
          let
            isDropped = name: !(keep name set.${name});
          in
          removeAttrs set (builtins.filter isDropped (builtins.attrNames set));
      };

      legacyPackages =
        genAttrs
          [
            "x86_64-linux"
            "aarch64-linux"
            "aarch64-darwin"
          ]
          (system: {
            linkFarm = name: entries: stub name system // { inherit entries; };
            mkShell =
              { packages }:
              stub "shell" system // { packages = map (package: package.name) packages; };
            nixfmt-tree = stub "nixfmt-tree" system;
          });
    };
}
