// Products of activations with packed weights.
//
// A panel of the weight passes by the rows of x in blocks that stay in the caches; meanwhile the block after it is
// fetched from memory. The sum of an element of the result is always taken in the order of k, one product at a time, so
// that a row's result is the same bits however many rows it is computed with, and on however many threads.
#include "linear.h"

#include "scratch.h"

namespace headstart {
namespace {

constexpr int kDepth = 192;      // of a block of a panel: with kTileRows rows of x it fits the first-level cache
constexpr int kMostRows = 256;   // of x per panel: they fit the second-level cache together with a block
constexpr int kLine = 64;        // bytes
constexpr int kFetchingTiles = 3;

template <int R>
using Tile = vf[R][kPanelVectors];

// tile (+)= x[R, depth] * block[depth, kPanel]. Meanwhile LINES cache lines per step are fetched, from `fetch` on.
template <int R, int LINES>
void add_block(const float* x, int64_t stride, const float* block, int depth, float* tile, bool first,
               const char* fetch) {
  Tile<R> sums;
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; v++) sums[r][v] = first ? vf{} : load(tile + r * kPanel + v * W);
  for (int i = 0; i < depth; i++) {
#pragma GCC unroll 4
    for (int line = 0; line < LINES; line++) __builtin_prefetch(fetch + line * kLine, 0, 2);
    fetch += LINES * kLine;
    vf weights[kPanelVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; v++) weights[v] = load(block + i * kPanel + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const float factor = x[r * stride + i];
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; v++) sums[r][v] += factor * weights[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; v++) store(tile + r * kPanel + v * W, sums[r][v]);
}

typedef void (*AddBlock)(const float*, int64_t, const float*, int, float*, bool, const char*);

#define HEADSTART_BY_ROWS(LINES)                                                                           \
  {                                                                                                        \
    nullptr, add_block<1, LINES>, add_block<2, LINES>, add_block<3, LINES>, add_block<4, LINES>,           \
        add_block<5, LINES>, add_block<6, LINES>, add_block<7, LINES>, add_block<8, LINES>                 \
  }
constexpr AddBlock kAddBlock[][9] = {HEADSTART_BY_ROWS(0), HEADSTART_BY_ROWS(1), HEADSTART_BY_ROWS(2),
                                     HEADSTART_BY_ROWS(3)};
#undef HEADSTART_BY_ROWS

// result[m, kPanel] = x[m, k] * panel^T. `after` is what will be read after this panel.
void multiply_panel(const float* x, int64_t stride, int m, const float* panel, int k, float* result,
                    const float* after) {
  const int tiles = (m + kTileRows - 1) / kTileRows;
  const int fetching = tiles < kFetchingTiles ? tiles : kFetchingTiles;
  const int lines_of_step = kPanel * int(sizeof(float)) / kLine;
  const int lines = (lines_of_step + fetching - 1) / fetching;
  for (int start = 0; start < k; start += kDepth) {
    const int depth = k - start < kDepth ? k - start : kDepth;
    const float* block = panel + int64_t(start) * kPanel;
    const char* next = reinterpret_cast<const char*>(start + depth < k ? block + int64_t(depth) * kPanel : after);
    for (int t = 0; t < tiles; t++) {
      const int row = m * t / tiles, rows = m * (t + 1) / tiles - row;
      const bool fetches = t * lines < lines_of_step;
      kAddBlock[fetches ? lines : 0][rows](x + row * stride + start, stride, block, depth, result + row * kPanel,
                                           start == 0, next + int64_t(t) * lines * depth * kLine);
    }
  }
}

// Which rows of x and which panel a part of a product is about.
struct Part {
  int row, rows, panel;
};

// How a product of m rows is cut into parts for the threads: panels, and rows where there are many or few panels.
struct Cut {
  int m, panels, rows, blocks;
  Cut(int m, int n) : m(m), panels((n + kPanel - 1) / kPanel) {
    blocks = (m + kMostRows - 1) / kMostRows;
    while (panels * blocks < 4 * threads && m / blocks >= 4 * kTileRows) blocks *= 2;
    rows = (m + blocks - 1) / blocks;
  }
  int parts() const { return panels * blocks; }
  Part part(int i) const {
    const int row = i / panels * rows;
    return {row, m - row < rows ? m - row : rows, i % panels};
  }
};

inline const float* panel_of(const headstart_matrix& weight, int panel) {
  const bool whole = (panel + 1) * kPanel <= weight.n;
  return whole ? static_cast<const float*>(weight.panels) + int64_t(panel) * kPanel * weight.k
               : static_cast<const float*>(weight.rest);
}

inline void add_bias(const headstart_matrix& weight, int column, int columns, float* row) {
  if (weight.bias)
    for (int i = 0; i < columns; i++) row[i] += weight.bias[column + i];
}

}  // namespace

void multiply(const float* x, int64_t stride, int m, const headstart_matrix& weight, float* out, int64_t out_stride,
              Then then) {
  const Cut cut(m, weight.n);
#pragma omp for schedule(dynamic) nowait
  for (int i = 0; i < cut.parts(); i++) {
    const Part part = cut.part(i);
    if (part.rows <= 0) continue;
    float* result = scratch.at_least(size_t(kMostRows) * kPanel);
    const float* panel = panel_of(weight, part.panel);
    multiply_panel(x + part.row * stride, stride, part.rows, panel, weight.k, result,
                   panel + int64_t(threads) * kPanel * weight.k);
    const int column = part.panel * kPanel, columns = weight.n - column < kPanel ? weight.n - column : kPanel;
    for (int r = 0; r < part.rows; r++) {
      float* from = result + r * kPanel;
      float* to = out + (part.row + r) * out_stride + column;
      add_bias(weight, column, columns, from);
      if (columns == kPanel) {
        for (int v = 0; v < kPanel; v += W) store(to + v, then == Then::kAdd ? load(to + v) + load(from + v) : load(from + v));
      } else {
        for (int c = 0; c < columns; c++) to[c] = then == Then::kAdd ? to[c] + from[c] : from[c];
      }
    }
  }
}

void multiply_gated(const float* x, int64_t stride, int m, const headstart_matrix& gate, const headstart_matrix& up,
                    float* out, int64_t out_stride) {
  const Cut cut(m, gate.n);
#pragma omp for schedule(dynamic) nowait
  for (int i = 0; i < cut.parts(); i++) {
    const Part part = cut.part(i);
    if (part.rows <= 0) continue;
    float* gates = scratch.at_least(2 * size_t(kMostRows) * kPanel);
    float* ups = gates + size_t(kMostRows) * kPanel;
    const float* start = x + part.row * stride;
    const float* gate_panel = panel_of(gate, part.panel);
    const float* up_panel = panel_of(up, part.panel);
    multiply_panel(start, stride, part.rows, gate_panel, gate.k, gates, up_panel);
    multiply_panel(start, stride, part.rows, up_panel, up.k, ups, gate_panel + int64_t(threads) * kPanel * gate.k);
    const int column = part.panel * kPanel, columns = gate.n - column < kPanel ? gate.n - column : kPanel;
    for (int r = 0; r < part.rows; r++) {
      float* g = gates + r * kPanel;
      float* u = ups + r * kPanel;
      float* to = out + (part.row + r) * out_stride + column;
      add_bias(gate, column, columns, g);
      add_bias(up, column, columns, u);
      for (int v = 0; v < kPanel; v += W) store(g + v, silu(load(g + v)) * load(u + v));
      memcpy(to, g, columns * sizeof(float));
    }
  }
}

void unpack_row(const headstart_matrix& weight, int64_t row, float* out) {
  const float* panel = panel_of(weight, int(row / kPanel)) + row % kPanel;
  for (int i = 0; i < weight.k; i++) out[i] = panel[int64_t(i) * kPanel];
}

}  // namespace headstart

extern "C" void headstart_multiply(const float* x, int m, const headstart_matrix* weight, float* out) {
  using namespace headstart;
#pragma omp parallel num_threads(threads)
  multiply(x, weight->k, m, *weight, out, weight->n, Then::kStore);
}
