// All layers of a Llama model over a batch of few tokens, in one call.
//
// Between two products that stream the weights through the caches nothing of an interpreter is left in them: called
// one by one, the operations of a decode step cost a tenth to a fifth of it before they have begun.
#include "kernels.h"

extern "C" void headstart_layers(const headstart_batch* batch) {
  const headstart_batch& b = *batch;
  const int turned = b.heads + b.kv_heads, all = turned + b.kv_heads, qkv_width = all * b.dim, head_width = b.heads * b.dim;
  for (int i = 0; i < b.layer_count; i++) {
    const headstart_layer& layer = b.layers[i];
    headstart_rms_norm(b.hidden, layer.input_norm, b.normed, b.tokens, b.width, b.eps);
    headstart_linear(b.normed, b.width, layer.qkv, layer.qkv_bias, b.qkv, qkv_width, b.tokens, qkv_width, b.width, 0);
    headstart_rotate(b.qkv, qkv_width, b.cos, b.sin, layer.query_norm, layer.key_norm, b.tokens, b.heads, turned, b.dim,
                     b.eps);
    headstart_attention a = b.attentions[layer.kind];
    a.query = b.qkv;
    a.key = b.qkv + head_width;
    a.value = b.qkv + turned * b.dim;
    a.out = b.attended;
    a.query_token = a.key_token = a.value_token = qkv_width;
    a.query_head = a.key_head = a.value_head = b.dim;
    a.pool_keys = b.pool[i].keys;
    a.pool_values = b.pool[i].values;
    a.key_scales = b.pool[i].key_scales;
    a.value_scales = b.pool[i].value_scales;
    a.scaling = layer.scaling;
    headstart_attend(&a);
    headstart_linear(b.attended, head_width, layer.output, layer.output_bias, b.hidden, b.width, b.tokens, b.width,
                     head_width, 1);
    headstart_rms_norm(b.hidden, layer.mlp_norm, b.normed, b.tokens, b.width, b.eps);
    headstart_linear(b.normed, b.width, layer.gate_up, layer.gate_up_bias, b.gate_up, 2 * b.intermediate, b.tokens,
                     2 * b.intermediate, b.width, 0);
    headstart_silu_product(b.gate_up, b.product, b.tokens, b.intermediate);
    headstart_linear(b.product, b.intermediate, layer.down, layer.down_bias, b.hidden, b.width, b.tokens, b.width,
                     b.intermediate, 1);
  }
}
