// Experts by dot products, for any vector width: vectors of weights, turned so that their lanes are rows, times single
// elements of activations. A sum's order depends on its length alone, whatever is computed beside it.
#include "cpu/experts.h"
#include "cpu/experts_dot.inl.h"

namespace rudnn::RUDNN_ISA {

void experts_activated(const ExpertsArgs& args, int64_t begin, int64_t end) {
  visit_dtype(args.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    activated_units<WideProduct<T>>(args, begin, end);
  });
}

void experts_output(const ExpertsArgs& args, int64_t begin, int64_t end) {
  visit_dtype(args.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    output_blocks<WideProduct<T>>(args, begin, end);
  });
}

}  // namespace rudnn::RUDNN_ISA
