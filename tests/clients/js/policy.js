// The forward pass of a llama in float 32 (nous-default, MDL-2).
import { readSafetensors, widen } from './checkpoints.js'
import { must } from './msgpack.js'

// y = keep y + W x, in four sums that do not wait for each other
function times(y, w, x, keep = 0) {
  for (let o = 0, at = 0; o < y.length; o++) {
    let a = 0, b = 0, c = 0, d = 0
    for (let i = 0; i < x.length; i += 4, at += 4) {
      a += w[at] * x[i]; b += w[at + 1] * x[i + 1]; c += w[at + 2] * x[i + 2]; d += w[at + 3] * x[i + 3]
    }
    y[o] = keep * y[o] + (a + b + c + d)
  }
  return y
}
function normed(y, x, w, eps) {
  const root = Math.sqrt(x.reduce((sum, value) => sum + value * value, 0) / x.length + eps)
  for (let i = 0; i < x.length; i++) y[i] = w[i] * x[i] / root
  return y
}
// The first half of each head against its second; `turns` holds the cosines, then the sines.
function rotated(x, turns) {
  for (let head = 0, half = turns.length / 2; head < x.length; head += 2 * half) {
    for (let j = 0, i = head; j < half; i++, j++) {
      const a = x[i], b = x[i + half]
      x[i] = a * turns[j] - b * turns[j + half]
      x[i + half] = b * turns[j] + a * turns[j + half]
    }
  }
}

/** The policy of a `model.safetensors` and the object of its `config.json` (nous-default, MDL-2). */
export function loadPolicy(bytes, config) {
  const { hidden_size: H, intermediate_size: I, num_attention_heads: A, num_key_value_heads: G = A, head_dim: D = H / A,
    num_hidden_layers: N, vocab_size: V, max_position_embeddings: context, rope_parameters: rope } = config
  must(config.model_type === 'llama' && config.hidden_act === 'silu' && rope?.rope_type === 'default')
  must(config.tie_word_embeddings && !config.attention_bias && !config.mlp_bias && (H | I | A * D) % 4 === 0) // `times`
  const file = readSafetensors(bytes), tensor = (name, ...shape) => widen(file.get(`model.${name}.weight`), shape)
  const embed = tensor('embed_tokens', V, H), norm = tensor('norm', H), row = G * D, stride = 2 * N * row
  const layers = Array.from({ length: N }, (_, l) => {
    const of = (name, ...shape) => tensor(`layers.${l}.${name}`, ...shape)
    return { before: of('input_layernorm', H), q: of('self_attn.q_proj', A * D, H), k: of('self_attn.k_proj', row, H),
      v: of('self_attn.v_proj', row, H), o: of('self_attn.o_proj', H, A * D), after: of('post_attention_layernorm', H),
      gate: of('mlp.gate_proj', I, H), up: of('mlp.up_proj', I, H), down: of('mlp.down_proj', H, I) }
  })
  const rates = Array.from({ length: D / 2 }, (_, i) => Math.fround(rope.rope_theta ** (-2 * i / D)))
  const turns = Array.from({ length: context }, (_, p) =>
    Float32Array.from([Math.cos, Math.sin].flatMap((f) => rates.map((rate) => f(Math.fround(p * rate))))))
  const [h, x, q, o, gate, up, logits] = [H, H, A * D, A * D, I, I, V].map((size) => new Float32Array(size))
  const scores = new Float64Array(context), scaled = (w) => normed(x, h, w, config.rms_norm_eps)

  function attend(cache, keys, p) { // `cache` holds for each position, layer by layer, a row of keys and one of values
    o.fill(0)
    for (let head = 0; head < A; head++) {
      const own = head * D, from = keys + Math.floor(head * G / A) * D
      let most = -Infinity, total = 0
      for (let j = 0, at = from; j <= p; j++, at += stride) {
        let dot = 0
        for (let i = 0; i < D; i++) dot += q[own + i] * cache[at + i]
        most = Math.max(most, scores[j] = dot / Math.sqrt(D))
      }
      for (let j = 0; j <= p; j++) total += scores[j] = Math.exp(scores[j] - most)
      for (let j = 0, at = from + row; j <= p; j++, at += stride)
        for (let i = 0; i < D; i++) o[own + i] += scores[j] / total * cache[at + i]
    }
    return o
  }
  function step(cache, token, p) {
    h.set(embed.subarray(token * H, (token + 1) * H))
    layers.forEach((layer, l) => {
      const keys = 2 * l * row, at = p * stride + keys
      rotated(times(q, layer.q, scaled(layer.before)), turns[p])
      rotated(times(cache.subarray(at, at + row), layer.k, x), turns[p])
      times(cache.subarray(at + row, at + 2 * row), layer.v, x)
      times(h, layer.o, attend(cache, keys, p), 1)
      times(gate, layer.gate, scaled(layer.after))
      times(up, layer.up, x)
      for (let i = 0; i < I; i++) up[i] *= gate[i] / (1 + Math.exp(-gate[i]))
      times(h, layer.down, up, 1)
    })
  }
  // Copies of a state go on by themselves: a group's samples share the work of their prompt.
  const state = (length, cache) => ({
    copy: () => state(length, cache.slice()),
    /** Logits behind the last of `tokens`, in an array that the next call writes to again. */
    feed(tokens) {
      must(length + tokens.length <= context, 'too-long')
      for (const token of tokens) step(cache, token, length++)
      return times(logits, embed, scaled(norm))
    },
  })
  return { start: () => state(0, new Float32Array(context * stride)) }
}
