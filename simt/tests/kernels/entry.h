// What a test kernel file offers to Python: functions that return null or the text of an error.
#pragma once

#ifdef RUDNN_SIMT
#include "simt/engine/host.h"

// A copy that lives until the next one of this library.
inline const char* keep_text(std::string text) {
  static std::string kept;
  kept.swap(text);
  return kept.c_str();
}

// What `run` throws, or null.
template <class F>
const char* error_text(F run) {
  try {
    run();
    return nullptr;
  } catch (const std::exception& error) {
    return keep_text(error.what());
  }
}

#define ENTRY(name, ...) extern "C" SIMT_API const char* name(__VA_ARGS__)
#define ENTRY_BODY(...) return error_text([&] { __VA_ARGS__; })
#else
#define ENTRY(name, ...) extern "C" void name(__VA_ARGS__)
#define ENTRY_BODY(...) __VA_ARGS__
#endif
