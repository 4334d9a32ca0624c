// A whole Llama model over one flat batch, in one call and one parallel region.
//
// Called one by one from Python, the operations of a decode step would cost a tenth to a fifth of it before they have
// begun; and what a thread has just computed is still in its caches for what follows.
#include "attention.h"
#include "linear.h"
#include "pointwise.h"

namespace headstart {
namespace {

void embed(const headstart_batch& b) {
#pragma omp for schedule(static) nowait
  for (int t = 0; t < b.tokens; t++) {
    float* out = b.hidden + int64_t(t) * b.width;
    if (b.embedding)
      unpack_row(*b.embedding, b.token_ids[t], out);
    else
      memcpy(out, static_cast<const float*>(b.table) + b.token_ids[t] * b.width, b.width * sizeof(float));
  }
}

void normalize_rows(const headstart_batch& b, const float* x, int rows, const float* weight) {
#pragma omp for schedule(static) nowait
  for (int r = 0; r < rows; r++) normalize(x + int64_t(r) * b.width, weight, b.normed + int64_t(r) * b.width, b.width, b.eps);
}

void rotate_rows(const headstart_batch& b, const headstart_layer& layer) {
  const int turned = b.heads + b.kv_heads;
#pragma omp for schedule(static) nowait
  for (int t = 0; t < b.tokens; t++) {
    const int64_t angles = b.positions[t] * (b.dim / 2);
    for (int head = 0; head < turned; head++) {
      float* x = b.qkv + (int64_t(t) * (turned + b.kv_heads) + head) * b.dim;
      const float* norm = head < b.heads ? layer.query_norm : layer.key_norm;
      if (norm) normalize(x, norm, x, b.dim, b.eps);
      rotate(x, b.cos + angles, b.sin + angles, b.dim);
    }
  }
}

headstart_attention attention_of(const headstart_batch& b, int index) {
  const headstart_layer& layer = b.layers[index];
  const int turned = b.heads + b.kv_heads;
  headstart_attention a = b.attentions[layer.kind];
  a.query = b.qkv;
  a.key = b.qkv + b.heads * b.dim;
  a.value = b.qkv + turned * b.dim;
  a.out = b.attended;
  a.query_token = a.key_token = a.value_token = (turned + b.kv_heads) * b.dim;
  a.query_head = a.key_head = a.value_head = b.dim;
  a.pool_keys = b.pool[index].keys;
  a.pool_values = b.pool[index].values;
  a.key_scales = b.pool[index].key_scales;
  a.value_scales = b.pool[index].value_scales;
  a.scaling = layer.scaling;
  return a;
}

// Behind the last attention only the rows are left whose logits are wanted.
void keep_rows(const headstart_batch& b) {
  const int attended = b.heads * b.dim;
#pragma omp for schedule(static) nowait
  for (int r = 0; r < b.row_count; r++) {
    memcpy(b.last_hidden + int64_t(r) * b.width, b.hidden + b.rows[r] * b.width, b.width * sizeof(float));
    memcpy(b.last_attended + int64_t(r) * attended, b.attended + b.rows[r] * attended, attended * sizeof(float));
  }
}

void forward(const headstart_batch& b) {
  const int attended_width = b.heads * b.dim;
  const float* attended = b.attended;
  float* hidden = b.hidden;
  int rows = b.tokens;
  embed(b);
  for (int i = 0; i < b.layer_count; i++) {
    const headstart_layer& layer = b.layers[i];
    // What is normalized, rotated and stored here was embedded by this thread too: schedules of the same loop length
    // are the same. Where a thread needs what another one has computed there is a barrier.
    if (i) {
#pragma omp barrier
    }
    normalize_rows(b, hidden, rows, layer.input_norm);
#pragma omp barrier
    multiply(b.normed, b.width, rows, layer.qkv, b.qkv, layer.qkv.n, Then::kStore);
#pragma omp barrier
    const headstart_attention a = attention_of(b, i);
    rotate_rows(b, layer);
    store_kv(a);
    if (i == b.layer_count - 1 && !b.row_count) return;
#pragma omp barrier
    attend(a);
#pragma omp barrier
    if (i == b.layer_count - 1) {
      keep_rows(b);
      attended = b.last_attended, hidden = b.last_hidden, rows = b.row_count;
#pragma omp barrier
    }
    multiply(attended, attended_width, rows, layer.output, hidden, b.width, Then::kAdd);
#pragma omp barrier
    normalize_rows(b, hidden, rows, layer.mlp_norm);
#pragma omp barrier
    multiply_gated(b.normed, b.width, rows, layer.gate, layer.up, b.product, layer.gate.n);
#pragma omp barrier
    multiply(b.product, layer.gate.n, rows, layer.down, hidden, b.width, Then::kAdd);
  }
#pragma omp barrier
  normalize_rows(b, hidden, rows, b.norm);
#pragma omp barrier
  multiply(b.normed, b.width, rows, *b.head, b.logits, b.head->n, Then::kStore);
}

}  // namespace
}  // namespace headstart

extern "C" void headstart_forward(const headstart_batch* batch) {
#pragma omp parallel num_threads(headstart::threads)
  headstart::forward(*batch);
}

extern "C" void headstart_set_threads(int count) { headstart::threads = count; }

// Bytes of the structures and the sizes that the kernels work in, so that the caller can check its picture of them.
extern "C" void headstart_layout(int32_t* sizes) {
  sizes[0] = sizeof(headstart_attention);
  sizes[1] = sizeof(headstart_task);
  sizes[2] = sizeof(headstart_merge);
  sizes[3] = sizeof(headstart_matrix);
  sizes[4] = sizeof(headstart_layer);
  sizes[5] = sizeof(headstart_kv);
  sizes[6] = sizeof(headstart_batch);
  sizes[7] = headstart::W;
  sizes[8] = headstart::kPanel;
  sizes[9] = headstart::kGroup;
}
