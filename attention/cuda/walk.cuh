// What the forward and the gradients have in common. A block keeps a tile of stationary rows and walks over tiles of
// streamed rows. From the products of the two it makes weights, and adds the streamed rows times these to its result. A
// role says which rows these are, what the weights are, and what becomes of the result; a machine, how all is computed.
//
// Roles give, for machines: kProducts, of which the scores are the first; stationary<p>() and streamed<p>(tile), the
// slices whose rows are multiplied; summed(tile), the slice whose rows are added; first(), next(tile) and last(), the
// tiles in their order; vectors(), whether 16 bytes may be moved at a time. And for walk(): args(), weigh(), from
// scores to weights, and finish().
//
// Machines give tiles: kRows stationary rows and kColumns columns of the result; Scores and Result, a thread's parts of
// them, and where these lie: row(i), column(j), for_each_run(); and multiply(), add_weighted() and scale().
#pragma once

#include "cuda/problem.cuh"

namespace rudnn {

// A block's place in a grid of slices of the result's columns, tiles, and key heads, from the fastest on.
struct BlockPlace {
  int64_t slice;
  int64_t tile;
  int64_t key_head;
  int64_t batch;

  __device__ __forceinline__ BlockPlace(int64_t slices, int64_t tiles, int64_t key_heads) {
    int64_t rest = blockIdx.x;
    slice = rest % slices;
    rest /= slices;
    tile = rest % tiles;
    rest /= tiles;
    key_head = rest % key_heads;
    batch = rest / key_heads;
  }
};

// From products to scores, before mask and bias.
template <class Machine>
__device__ __forceinline__ void score_products(const AttentionArgs& args, typename Machine::Scores& scores) {
  if (args.softcap == 0.0f) {
#pragma unroll
    for (int i = 0; i < Machine::kThreadRows; ++i)
#pragma unroll
      for (int j = 0; j < Machine::kThreadColumns; ++j) scores.at(i, j) *= args.scale;
  } else {
#pragma unroll
    for (int i = 0; i < Machine::kThreadRows; ++i)
#pragma unroll
      for (int j = 0; j < Machine::kThreadColumns; ++j)
        scores.at(i, j) = score_of(scores.at(i, j), args.scale, args.softcap);
  }
}

template <class Machine, class Role>
__device__ __forceinline__ void walk(Role& role, unsigned char* shared) {
  Machine machine(role, shared);
  typename Machine::Result result;
  for (int64_t tile = role.first(); tile < role.last(); tile = role.next(tile)) {
    typename Machine::Scores weights;
    machine.template multiply<0>(role, tile, weights);
    score_products<Machine>(role.args(), weights);
    bool excluding;
    if constexpr (Role::kProducts > 1) {
      typename Machine::Scores grads;
      machine.template multiply<1>(role, tile, grads);
      excluding = role.weigh(tile, weights, grads);
    } else {
      excluding = role.weigh(tile, weights, result);
    }
    machine.add_weighted(role, tile, weights, excluding, result);
  }
  role.finish(result);
}

template <class Machine, template <class> class Role>
__global__ void __launch_bounds__(Machine::kThreads, Machine::kLeastBlocks) walk_kernel(AttentionArgs args) {
  DYNAMIC_SHARED(shared);
  Role<Machine> role(args);
  walk<Machine>(role, shared);
}

// Of the roles whose stationary rows are those of queries, and whose streamed ones are keys.
template <class Machine>
class QueryRole {
  using T = typename Machine::Element;

 public:
  __device__ __forceinline__ const AttentionArgs& args() const { return args_; }
  __device__ __forceinline__ bool vectors() const { return args_.vectors; }
  __device__ __forceinline__ int64_t first() const { return next(begin_ - kStreamed); }
  __device__ __forceinline__ int64_t last() const { return end_; }
  __device__ __forceinline__ int64_t next(int64_t key) const {
    do key += kStreamed;
    while (key < end_ && !mask_leaves_some<Machine::kRows>(args_, tile_, key));
    return key;
  }

 protected:
  // Of the keys [first_key, last_key).
  __device__ __forceinline__ QueryRole(const AttentionArgs& args, const BlockPlace& place, int64_t tile,
                                       int64_t first_key, int64_t last_key)
      : args_(args),
        key_head_(place.key_head),
        column_(place.slice * Machine::kColumns),
        tile_(row_tile<Machine::kRows>(args, place.batch, place.key_head, tile)),
        keys_(TileKeys::of<Machine::kRows>(args, tile_)),
        begin_(max(first_key, keys_.some.first / kStreamed * kStreamed)),
        end_(min(last_key, keys_.some.last)) {
#pragma unroll
    for (int i = 0; i < Machine::kThreadRows; ++i) rows_[i] = query_row(args, tile_, Machine::row(i));
  }

  __device__ __forceinline__ bool excludes(int64_t key) const {
    return args_.mask.exists() || args_.bias.exists() || !keys_.all_have(key, kStreamed);
  }
  // Row i of the thread's scores, of a tile of keys.
  __device__ __forceinline__ void complete(int i, int64_t key, typename Machine::Scores& scores) const {
    ScoreRow(args_, tile_.batch, rows_[i], key)
        .template complete<T, Machine::kThreadColumns>(
            args_, [&](int j) -> float& { return scores.at(i, j); }, [](int j) { return Machine::column(j); });
  }
  __device__ __forceinline__ auto rows_of_heads(const HeadRows& source, int64_t columns) const {
    return slice(rows_of<T>(source, tile_, columns), tile_.first, 0);
  }
  __device__ __forceinline__ auto rows_of_keys(const HeadRows& source, int64_t columns, int64_t key,
                                               int64_t column) const {
    return slice(keys_of<T>(source, tile_.batch, key_head_, args_.window.keys, columns), key, column);
  }

  const AttentionArgs& args_;
  int64_t key_head_;
  int64_t column_;  // of the result
  RowTile tile_;
  TileKeys keys_;
  int64_t begin_;
  int64_t end_;
  QueryRow rows_[Machine::kThreadRows];
};

}  // namespace rudnn
