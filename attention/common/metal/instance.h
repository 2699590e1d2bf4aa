// Shader code.
#pragma once

// The instance of a kernel template for the arguments that follow, by the name that launchers ask for.
#define INSTANCE(name, function, ...) \
  template [[host_name(#name)]] [[kernel]] decltype(function<__VA_ARGS__>) function<__VA_ARGS__>;
