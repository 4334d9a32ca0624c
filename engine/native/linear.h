// Products of activations with packed weights, for any number of rows.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headstart {

// As many sums as the registers hold beside a row of weights: kTileRows rows by kPanelVectors vectors.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kPanelVectors = 3, kTileRows = 8;
#else
constexpr int kPanelVectors = 2, kTileRows = 6;
#endif
constexpr int kPanel = kPanelVectors * W;  // rows of a weight that lie together

enum class Then { kStore, kAdd };

// Both are called by all threads of a parallel region and share the work among them. They end without a barrier.

// out[m, n] (+)= x[m, k] * weight[n, k]^T + bias.
void multiply(const float* x, int64_t stride, int m, const headstart_matrix& weight, float* out, int64_t out_stride,
              Then then);

// out = silu(x * gate^T + bias) * (x * up^T + bias).
void multiply_gated(const float* x, int64_t stride, int m, const headstart_matrix& gate, const headstart_matrix& up,
                    float* out, int64_t out_stride);

// One row of a packed matrix.
void unpack_row(const headstart_matrix& weight, int64_t row, float* out);

}  // namespace headstart
