"""What `./dev` is made of: build, test, bench, demo, lint and vendor the kernels without Nix."""
