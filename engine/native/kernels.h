// What the kernels take. Python mirrors these structures in library.py.
#pragma once

#include <cstdint>

extern "C" {
struct headstart_task {
  int32_t first_row, rows;      // in `row_token` and `row_position`
  int32_t first_key, last_key;  // positions, the last one excluded
  int32_t table;                // where its block table starts in `tables`
  int32_t slot;                 // of the first row, the others follow; -1: rows are complete, write them out
};
struct headstart_merge {
  int32_t token, first, count;  // in `merge_slots`
};
struct headstart_attention {
  const float *query, *key, *value;
  float* out;  // [tokens, heads, value_dim]
  void *pool_keys, *pool_values;
  float *key_scales, *value_scales;  // [blocks, kv_heads, block], for int8
  const float* sinks;
  int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // strides in elements
  const int64_t* slots;                                                           // of the batch's tokens
  const headstart_task* tasks;
  const int32_t *row_token, *row_position, *tables;
  const headstart_merge* merges;
  const int32_t* merge_slots;
  float* partials;  // [slots, heads, padded value_dim + 2]
  int32_t tokens, task_count, merge_count;
  int32_t heads, kv_heads, key_dim, value_dim, block;
  int32_t kind;    // of the pool: 0 float32, 1 bfloat16, 2 int8
  int32_t window;  // 0: none
  float scaling, softcap;
};

// Weights of a layer, see LeanLayer. Biases and head norms may be null.
struct headstart_layer {
  const float *input_norm, *qkv, *qkv_bias, *query_norm, *key_norm, *output, *output_bias;
  const float *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias;
  float scaling;
  int32_t kind;  // which of the batch's attentions (they differ in their windows)
};
struct headstart_kv {
  void *keys, *values;
  float *key_scales, *value_scales;
};
struct headstart_batch {
  const headstart_layer* layers;
  const headstart_kv* pool;                // by layer
  const headstart_attention* attentions;   // by kind; what differs between layers is filled in
  const float *cos, *sin;                  // [tokens, dim / 2]
  float *hidden;                           // [tokens, width], in and out
  float *normed, *qkv, *attended, *gate_up, *product;
  int32_t layer_count, tokens, width, intermediate, heads, kv_heads, dim;
  float eps;
};

void headstart_attend(const headstart_attention*);
void headstart_linear(const float*, int64_t, const float*, const float*, float*, int64_t, int, int, int, int);
void headstart_rms_norm(const float*, const float*, float*, int, int, float);
void headstart_rotate(float*, int64_t, const float*, const float*, const float*, const float*, int, int, int, int, float);
void headstart_silu_product(const float*, float*, int, int);
}
