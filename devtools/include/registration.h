// What kernel-builder puts beside torch_binding.cpp for a release; this one serves local builds.
//
// The *_EXPAND forms expand their arguments before PyTorch's macros turn them into strings, so that a macro such as
// TORCH_EXTENSION_NAME can stand for the namespace.
#pragma once

#include <Python.h>

#define TORCH_LIBRARY_EXPAND(NAME, MODULE) TORCH_LIBRARY(NAME, MODULE)
#define TORCH_LIBRARY_IMPL_EXPAND(NAME, DEVICE, MODULE) TORCH_LIBRARY_IMPL(NAME, DEVICE, MODULE)
#define STABLE_TORCH_LIBRARY_EXPAND(NAME, MODULE) STABLE_TORCH_LIBRARY(NAME, MODULE)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, DEVICE, MODULE) STABLE_TORCH_LIBRARY_IMPL(NAME, DEVICE, MODULE)

#define RUDNN_STRING(TEXT) #TEXT
#define RUDNN_MODULE(NAME)                                                                                   \
  PyMODINIT_FUNC PyInit_##NAME() {                                                                           \
    static PyModuleDef definition = {                                                                        \
        PyModuleDef_HEAD_INIT, RUDNN_STRING(NAME), nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr}; \
    return PyModule_Create(&definition);                                                                     \
  }

// Defines the (empty) Python module whose import loads the library and so runs its registrations.
#define REGISTER_EXTENSION(NAME) RUDNN_MODULE(NAME)
