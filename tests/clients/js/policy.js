// Tasks and seeded draws (chapter 06), what a verifier measures (08), sort-digits, and the forward pass of a llama.
import { createCipheriv, createHash } from 'node:crypto'
import { must } from './msgpack.js'
import { readSafetensors, widen } from './checkpoints.js'

const digest = (name, outputLength, ...parts) =>
  parts.reduce((hash, part) => hash.update(part), createHash(name, { outputLength })).digest()

export const taskSeed = (run, checkpoint, beacon, key, counter) => digest('sha256', 32,
  'nous/task/1\0', run, checkpoint, beacon, key, new Uint8Array(BigUint64Array.of(BigInt(counter)).buffer))

/** What a task's seed draws: the number of the environment, its seed, and the sampler keys of the trajectories. */
export function assign(seed, weights, samples) {
  const stream = digest('shake256', 72 + 32 * samples, 'nous/draw/1\0', seed)
  let ticket = stream.readBigUInt64LE() * BigInt(weights.reduce((a, b) => a + b, 0)) >> 64n
  const environment = weights.findIndex((weight) => (ticket -= BigInt(weight)) < 0n)
  const samplerKeys = Array.from({ length: samples }, (_, i) => stream.subarray(40 + 32 * i, 72 + 32 * i))
  return { stream: stream.subarray(0, 72), environment, taskSeed: stream.subarray(8, 40), samplerKeys }
}

/** The bytes behind the uniforms `start` to `start + count - 1` of a sampler key. */
export function keystream(key, start, count) {
  const skipped = 8 * (start % 8), block = new Uint8Array(Uint32Array.of(start / 8, 0, 0, 0).buffer) // nonce: zeros
  return createCipheriv('chacha20', key, block).update(Buffer.alloc(skipped + 8 * count)).subarray(skipped)
}
export function uniforms(key, start, count) {
  const bytes = keystream(key, start, count)
  const upper53 = (t) => bytes.readUInt32LE(8 * t + 4) * 2 ** 21 + (bytes.readUInt32LE(8 * t) >>> 11)
  return Float64Array.from({ length: count }, (_, t) => upper53(t) * 2 ** -53)
}

function intervals(logits, temperature) {
  const sums = new Float64Array(logits.length)
  let most = -Infinity, total = 0
  for (let i = 0; i < sums.length; i++) most = Math.max(most, logits[i])
  for (let i = 0; i < sums.length; i++) sums[i] = total += Math.exp((logits[i] - most) / temperature)
  return { sums, total, logprob: (k) => Math.fround((logits[k] - most) / temperature - Math.log(total)) }
}
export function choose(logits, temperature, uniform) {
  const { sums, total, logprob } = intervals(logits, temperature), point = uniform * total
  const token = sums.findIndex((sum) => sum > point)
  must(token >= 0, 'not-finite') // a logit that is no number, or none above minus infinity
  return { token, logprob: logprob(token) }
}
/** How far `uniform` lies from the interval of `token` (SMP-5), and the token's log-prob. */
export function distance(logits, temperature, uniform, token) {
  const { sums, total, logprob } = intervals(logits, temperature), point = uniform * total
  const beside = Math.max((token > 0 ? sums[token - 1] : 0) - point, point - sums[token], 0)
  return { distance: beside / total, logprob: logprob(token) }
}

/** VER-10. */
export const limitAt = ({ mean, limit }, weight, reference) =>
  mean + (limit - mean) * Math.sqrt(Math.max(1, reference / Math.max(1, weight)))

/** VER-4, VER-5: `trajectories` have `reported` and `recomputed` log-probs and `distances` (in a free run none). */
export function verify({ logprobs, distances, distance_max, tokens }, trajectories) {
  const sum = (values) => values.reduce((a, b) => a + b, 0), parts = trajectories.filter((part) => part.reported.length)
  must(parts.length, 'segments')
  const all = (name) => parts.flatMap((part) => part[name] ?? [])
  const group = { reported: all('reported'), recomputed: all('recomputed'), distances: all('distances') }
  const figures = [group, ...parts].map(({ reported, recomputed, distances = [] }) => {
    const weight = sum(recomputed.map((q) => isNaN(q) ? 1 : 1 - 0.9 * Math.exp(q)))
    const mad = sum(reported.map((p, j) => Math.abs(p - recomputed[j]))) / weight
    return { weight, mad, distance: sum(distances) / weight, largest: distances.reduce((a, b) => Math.max(a, b), 0) }
  })
  const within = (code, value, limit) => must(value <= limit, code, value, limit) // NaN never is
  for (const one of figures) {
    within('logprob-mismatch', one.mad, limitAt(logprobs, one.weight, tokens))
    within('sampling-mismatch', one.distance, limitAt(distances, one.weight, tokens))
    within('sampling-mismatch', one.largest, distance_max)
  }
  return figures[0]
}

const SPELLED = { 256: '<pad>', 257: '<bos>', 258: '<eos>' }, utf8 = new TextDecoder('utf-8', { ignoreBOM: true })
export const tokensOf = (text) => [...Buffer.from(text)]
export const textOf = (tokens) => utf8.decode(Buffer.concat(tokens.map((id) => Buffer.from(SPELLED[id] ?? [id]))))

export const sortDigits = {
  task(seed, length, level) {
    const stream = digest('shake256', 80, 'nous/sort-digits/1\0', seed)
    const n = length + Math.floor(stream[0] * (Math.min(Number(level), 8) + 1) / 256)
    const digits = [...stream.subarray(1, 1 + n)].map((byte) => Math.floor(byte * 10 / 256))
    return { prompt: `sort ${digits.join('')}=`, solution: digits.sort().join('') }
  },
  score(solution, answer, ended) {
    const right = [...solution], given = [...answer], hits = right.filter((digit, i) => digit === given[i])
    return ended ? hits.length / Math.max(right.length, given.length) : 0
  },
}

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
