// Products of activations with packed weights.
//
// A panel of the weight passes by the rows of x in blocks that stay in the caches; meanwhile the block after it is
// fetched from memory. The sum of an element of the result is always taken in the order of k, one product at a time, so
// that a row's result is the same bits however many rows it is computed with, and on however many threads.
//
// A weight may lie in memory in fewer bits than float32. It becomes float32 block by block in the first-level cache, to
// the same values that were packed, so that nothing of this holds any less.
#include "linear.h"

#include "scratch.h"

namespace headstart {
namespace {

constexpr int kDepth = 96;       // of a block of a panel: it fits half of a first-level cache, rows of x the rest
constexpr int kMostRows = 256;   // of x per panel: they fit the second-level cache together with a block
constexpr int kLine = 64;        // bytes
constexpr int kFetchingTiles = 3;
constexpr int kScaled = 32;      // of k that share a scale and an offset; divides kDepth

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

// How the weights of a panel lie in its words of 32 bits, see kernels.h.
enum Kind : int32_t { kFloats, kPairs, kNibbles, kBytes };

// Words of `depth` rows of a panel.
int64_t words_of(int kind, int64_t depth) {
  switch (kind) {
    case kPairs:
      return (depth + 1) / 2 * kPanel;
    case kNibbles:
      return depth / kScaled * (2 + kScaled / 8) * kPanel;
    case kBytes:
      return depth / kScaled * (2 + kScaled / 4) * kPanel;
    default:
      return depth * kPanel;
  }
}

inline vi words_at(const float* p) { return (vi)load(p); }  // casts between vectors keep the bits

// Starts to bring the row of a panel at `p` into the cache.
inline void fetch_row(const float* p) {
  for (int i = 0; i < kPanel * int(sizeof(float)); i += kLine)
    __builtin_prefetch(reinterpret_cast<const char*>(p) + i, 0, 2);
}

void expand_pairs(const float* words, int depth, float* out, const float* fetch) {
  for (int i = 0; i < depth; i += 2, words += kPanel, fetch += kPanel, out += 2 * kPanel) {
    fetch_row(fetch);
    for (int v = 0; v < kPanel; v += W) {
      const vi pair = words_at(words + v);
      store(out + v, (vf)(pair << 16));
      store(out + kPanel + v, (vf)(pair & int32_t(0xffff0000)));
    }
  }
}

template <int BITS>
void expand_scaled(const float* words, int depth, float* out, const float* fetch) {
  constexpr int kValues = 32 / BITS;  // of a word
  for (int i = 0; i < depth; i += kScaled) {
    const float *scales = words, *offsets = words + kPanel;
    fetch_row(fetch), fetch_row(fetch + kPanel);
    words += 2 * kPanel, fetch += 2 * kPanel;
    for (int j = 0; j < kScaled; j += kValues, words += kPanel, fetch += kPanel, out += kValues * kPanel) {
      fetch_row(fetch);
      for (int v = 0; v < kPanel; v += W) {
        const vi some = words_at(words + v);
        const vf scale = load(scales + v), offset = load(offsets + v);
#pragma GCC unroll 8
        for (int value = 0; value < kValues; value++)
          store(out + value * kPanel + v, low_bits<BITS>(some >> (BITS * value)) * scale + offset);
      }
    }
  }
}

// out[depth, kPanel] = `depth` rows of a panel, and one more where they are pairs and depth is odd. Meanwhile as much
// is fetched from `fetch` on as is read.
void expand(int kind, const float* words, int depth, float* out, const float* fetch) {
  if (kind == kPairs) expand_pairs(words, depth, out, fetch);
  if (kind == kNibbles) expand_scaled<4>(words, depth, out, fetch);
  if (kind == kBytes) expand_scaled<8>(words, depth, out, fetch);
}

struct Panel {
  const float* words;
  int kind, k;
};

// result[m, kPanel] = x[m, k] * panel^T. `after` is what will be read after this panel.
void multiply_panel(const float* x, int64_t stride, int m, const Panel& panel, float* result, const float* after) {
  const int tiles = (m + kTileRows - 1) / kTileRows;
  const int fetching = tiles < kFetchingTiles ? tiles : kFetchingTiles;
  const int lines_of_step = kPanel * int(sizeof(float)) / kLine;
  const int lines = (lines_of_step + fetching - 1) / fetching;
  alignas(64) float space[kDepth * kPanel];
  const float* words = panel.words;
  for (int start = 0; start < panel.k; start += kDepth) {
    const int depth = panel.k - start < kDepth ? panel.k - start : kDepth;
    const float* behind = words + words_of(panel.kind, depth);
    const float* next = start + depth < panel.k ? behind : after;
    if (panel.kind != kFloats) expand(panel.kind, words, depth, space, next);
    for (int t = 0; t < tiles; t++) {
      const int row = m * t / tiles, rows = m * (t + 1) / tiles - row;
      const bool fetches = panel.kind == kFloats && t * lines < lines_of_step;
      kAddBlock[fetches ? lines : 0][rows](x + row * stride + start, stride, panel.kind == kFloats ? words : space,
                                           depth, result + row * kPanel, start == 0,
                                           reinterpret_cast<const char*>(next) + int64_t(t) * lines * depth * kLine);
    }
    words = behind;
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

inline Panel panel_of(const headstart_matrix& weight, int panel) {
  const bool whole = (panel + 1) * kPanel <= weight.n;
  const float* words = static_cast<const float*>(whole ? weight.panels : weight.rest);
  return {whole ? words + panel * words_of(weight.kind, weight.k) : words, weight.kind, weight.k};
}

// What the thread will probably read when it is done with a panel: the next one that no other thread has.
inline const float* behind(const Panel& panel) { return panel.words + threads * words_of(panel.kind, panel.k); }

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
    const Panel panel = panel_of(weight, part.panel);
    multiply_panel(x + part.row * stride, stride, part.rows, panel, result, behind(panel));
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
    const Panel gate_panel = panel_of(gate, part.panel), up_panel = panel_of(up, part.panel);
    multiply_panel(start, stride, part.rows, gate_panel, gates, up_panel.words);
    multiply_panel(start, stride, part.rows, up_panel, ups, behind(gate_panel));
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
  const Panel panel = panel_of(weight, int(row / kPanel));
  const float* words = panel.words;
  alignas(64) float space[kDepth * kPanel];
  for (int start = 0; start < weight.k; start += kDepth) {
    const int depth = weight.k - start < kDepth ? weight.k - start : kDepth;
    if (panel.kind != kFloats) expand(panel.kind, words, depth, space, words);
    const float* rows = (panel.kind == kFloats ? words : space) + row % kPanel;
    for (int i = 0; i < depth; i++) out[start + i] = rows[int64_t(i) * kPanel];
    words += words_of(panel.kind, depth);
  }
}

}  // namespace headstart

extern "C" void headstart_multiply(const float* x, int m, const headstart_matrix* weight, float* out) {
  using namespace headstart;
#pragma omp parallel num_threads(threads)
  multiply(x, weight->k, m, *weight, out, weight->n, Then::kStore);
}
