// Launches of gradients that are compiled by themselves, since each takes long.
#pragma once

#include "cuda/problem.cuh"

namespace rudnn {

void launch_grad_query(const AttentionArgs& args, DType dtype, bool accelerated, Stream stream);
void launch_grad_key(const AttentionArgs& args, DType dtype, bool accelerated, Stream stream);
void launch_grad_value(const AttentionArgs& args, DType dtype, bool accelerated, Stream stream);

}  // namespace rudnn
