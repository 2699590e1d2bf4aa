"""One module per sub-command.

Each has `HELP` (one line), `DESCRIPTION`, `NEEDS_ENVIRONMENT` (whether it must run inside the virtual environment),
`configure(parser)` and `run(arguments)`, which returns the exit status. It may have `needs_cuda(arguments)`: whether a
CUDA compiler must be there too. All modules are imported to make the help text, so what lies in the environment is
imported inside functions.
"""
