# Copied into each family by ./dev vendor: the Hub's builder looks for a flake where build.toml is. The flake at the top
# of the repository has the same input and the same lock, and says how to update both.
{
  description = "A ruDNN kernel";

  inputs.kernel-builder.url = "github:huggingface/kernels/8ac69fc542a4306eade0759ef7c45b4f2ae57df0";

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
