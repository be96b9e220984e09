// Tasks and seeded draws (chapter 06), what a verifier measures (08), sort-digits, and the forward pass of a llama.
import { createCipheriv, createHash } from 'node:crypto'
import { must } from './msgpack.js'
import { readSafetensors, widen } from './checkpoints.js'

const sha = (name, parts, options) => parts.reduce((hash, part) => hash.update(part), createHash(name, options)).digest()

export function taskSeed(run, checkpoint, beacon, key, counter) {
  const number = new Uint8Array(BigUint64Array.of(BigInt(counter)).buffer)
  return sha('sha256', ['nous/task/1\0', run, checkpoint, beacon, key, number])
}

/** What a task's seed draws: the number of the environment, its seed, and the sampler keys of the trajectories. */
export function assign(seed, weights, samples) {
  const stream = sha('shake256', ['nous/draw/1\0', seed], { outputLength: 72 + 32 * samples })
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
  const { sums, total, logprob } = intervals(logits, temperature)
  const token = sums.findIndex((sum) => sum > uniform * total)
  return { token, logprob: logprob(token) }
}

/** How far `uniform` lies from the interval of `token` (SMP-5), and the token's log-prob. */
export function distance(logits, temperature, uniform, token) {
  const { sums, total, logprob } = intervals(logits, temperature), point = uniform * total
  const beside = Math.max((token ? sums[token - 1] : 0) - point, point - sums[token], 0)
  return { distance: beside / total, logprob: logprob(token) }
}

export const limitAt = ({ mean, limit }, weight, reference) =>
  mean + (limit - mean) * Math.sqrt(Math.max(1, reference / Math.max(1, weight)))

/** VER-4, VER-5: `trajectories` have `reported` and `recomputed` log-probs and `distances` (in a free run none). */
export function verify({ logprobs, distances, distance_max, tokens }, trajectories) {
  const sum = (values) => values.reduce((a, b) => a + b, 0)
  const within = (code, value, limit) => must(value <= limit, code, value, limit) // NaN never is
  const parts = trajectories.filter(({ reported }) => reported.length)
  must(parts.length, 'segments')
  const all = (name) => parts.flatMap((part) => part[name] ?? [])
  const group = { reported: all('reported'), recomputed: all('recomputed'), distances: all('distances') }
  const figures = [group, ...parts].map(({ reported, recomputed, distances = [] }) => {
    const weight = sum(recomputed.map((q) => Number.isNaN(q) ? 1 : 1 - 0.9 * Math.exp(q)))
    const mad = sum(reported.map((p, j) => Math.abs(p - recomputed[j]))) / weight
    return { weight, mad, distance: sum(distances) / weight, largest: Math.max(0, ...distances) }
  })
  for (const { mad, weight } of figures) within('logprob-mismatch', mad, limitAt(logprobs, weight, tokens))
  for (const { distance, largest, weight } of figures) {
    within('sampling-mismatch', distance, limitAt(distances, weight, tokens))
    within('sampling-mismatch', largest, distance_max)
  }
  return figures[0]
}

const SPELLED = { 256: '<pad>', 257: '<bos>', 258: '<eos>' }, utf8 = new TextDecoder('utf-8', { ignoreBOM: true })
export const tokensOf = (text) => [...Buffer.from(text)]
export const textOf = (tokens) => utf8.decode(Buffer.concat(tokens.map((id) => Buffer.from(SPELLED[id] ?? [id]))))

export const sortDigits = {
  task(seed, length, level) {
    const stream = sha('shake256', ['nous/sort-digits/1\0', seed], { outputLength: 80 })
    const n = length + Math.floor(stream[0] * (Math.min(Number(level), 8) + 1) / 256)
    const digits = [...stream.subarray(1, 1 + n)].map((byte) => Math.floor(byte * 10 / 256))
    return { prompt: `sort ${digits.join('')}=`, solution: digits.sort().join('') }
  },
  score(solution, answer, ended) {
    const right = [...solution], given = [...answer]
    return ended ? right.filter((digit, i) => digit === given[i]).length / Math.max(right.length, given.length) : 0
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
  let squares = 0
  for (let i = 0; i < x.length; i++) squares += x[i] * x[i]
  const root = Math.sqrt(squares / x.length + eps)
  for (let i = 0; i < x.length; i++) y[i] = w[i] * x[i] / root
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

/** The keys and values of the tokens fed so far. Its copies go on by themselves: samples share their prompt. */
class State {
  constructor(policy, length = 0, cache = new Float32Array(32 * policy.stride)) {
    Object.assign(this, { policy, length, cache })
  }
  copy() { return new State(this.policy, this.length, this.cache.slice()) }
  /** Logits behind the last of `tokens`; the array is the policy's, and its next call writes to it again. */
  feed(tokens) {
    const { h, x, norm, eps, logits, embed } = this.policy
    for (const token of tokens) this.step(token, this.length++)
    normed(x, h, norm, eps)
    return times(logits, embed, x)
  }
  step(token, p) {
    const { stride, width, layers, embed, eps, turn, h, x, q, o, gate, up } = this.policy
    if (this.cache.length < (p + 1) * stride) {
      const before = this.cache
      this.cache = new Float32Array(2 * before.length)
      this.cache.set(before)
    }
    const turns = turn(p)
    h.set(embed.subarray(token * h.length, (token + 1) * h.length))
    for (let l = 0, at = p * stride; l < layers.length; l++, at += 2 * width) {
      const layer = layers[l]
      normed(x, h, layer.input_layernorm, eps)
      rotated(times(q, layer.q_proj, x), turns)
      rotated(times(this.cache.subarray(at, at + width), layer.k_proj, x), turns)
      times(this.cache.subarray(at + width, at + 2 * width), layer.v_proj, x)
      this.attend(2 * l * width, p)
      times(h, layer.o_proj, o, 1)
      normed(x, h, layer.post_attention_layernorm, eps)
      times(gate, layer.gate_proj, x)
      times(up, layer.up_proj, x)
      for (let i = 0; i < up.length; i++) up[i] *= gate[i] / (1 + Math.exp(-gate[i]))
      times(h, layer.down_proj, up, 1)
    }
  }
  attend(keys, p) {
    const { heads, dim, shared, width, stride, q, o, scores } = this.policy, cache = this.cache
    o.fill(0)
    for (let head = 0; head < heads; head++) {
      const own = head * dim, from = keys + Math.floor(head / shared) * dim
      let most = -Infinity, total = 0
      for (let j = 0, at = from; j <= p; j++, at += stride) {
        let dot = 0
        for (let i = 0; i < dim; i++) dot += q[own + i] * cache[at + i]
        most = Math.max(most, scores[j] = dot / Math.sqrt(dim))
      }
      for (let j = 0; j <= p; j++) total += scores[j] = Math.exp(scores[j] - most)
      for (let j = 0, at = from + width; j <= p; j++, at += stride) {
        for (let i = 0; i < dim; i++) o[own + i] += scores[j] / total * cache[at + i]
      }
    }
  }
}

/** A policy of the bytes of a `model.safetensors` and the object of a `config.json`. */
export function loadPolicy(bytes, config) {
  const file = readSafetensors(bytes), room = (n) => new Float32Array(n)
  const { hidden_size: H, intermediate_size: I, num_attention_heads: heads, vocab_size: V } = config
  const dim = config.head_dim, width = config.num_key_value_heads * dim, all = heads * dim
  const tensor = (name, length) => widen(file.get(`model.${name}.weight`), length)
  const sizes = { input_layernorm: H, 'self_attn.q_proj': all * H, 'self_attn.k_proj': width * H, 'self_attn.v_proj': width * H,
    'self_attn.o_proj': H * all, post_attention_layernorm: H, 'mlp.gate_proj': I * H, 'mlp.up_proj': I * H, 'mlp.down_proj': H * I }
  const layer = (_, l) => Object.fromEntries(Object.entries(sizes).map(([name, size]) =>
    [name.split('.').at(-1), tensor(`layers.${l}.${name}`, size)]))
  const rates = Array.from({ length: dim / 2 }, (_, i) => Math.fround(config.rope_parameters.rope_theta ** (-2 * i / dim)))
  const turns = Array.from({ length: config.max_position_embeddings }, (_, p) =>
    Float32Array.from([Math.cos, Math.sin].flatMap((part) => rates.map((rate) => part(Math.fround(p * rate))))))
  const policy = { heads, dim, width, shared: heads * dim / width, stride: 2 * width * config.num_hidden_layers, turn: (p) => turns[p],
    eps: config.rms_norm_eps, embed: tensor('embed_tokens', V * H), norm: tensor('norm', H), logits: room(V), h: room(H), x: room(H),
    layers: Array.from({ length: config.num_hidden_layers }, layer), q: room(all), o: room(all), gate: room(I), up: room(I),
    scores: new Float64Array(config.max_position_embeddings) }
  return { ...policy, start: () => new State(policy) }
}
