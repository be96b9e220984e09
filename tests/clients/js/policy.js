// Tasks, seeded sampling (chapter 06), the environment sort-digits, and the forward pass of the family llama.
import { createCipheriv, createHash } from "node:crypto";
import { Refused } from "./msgpack.js";
import { readSafetensors, widen } from "./checkpoints.js";

const sha256 = (...parts) => parts.reduce((hash, part) => hash.update(part), createHash("sha256")).digest();
const shake256 = (length, ...parts) =>
  parts.reduce((hash, part) => hash.update(part), createHash("shake256", { outputLength: length })).digest();

export function taskSeed(run, checkpoint, beacon, key, counter) {
  const number = Buffer.alloc(8);
  number.writeBigUInt64LE(BigInt(counter));
  return sha256("nous/task/1\0", run, checkpoint, beacon, key, number);
}

/** What a task's seed draws: the index of the environment, its seed, and the sampler keys of the trajectories. */
export function assign(seed, weights, samples) {
  const stream = shake256(40 + 32 * Math.max(1, samples), "nous/draw/1\0", seed);
  let ticket = (stream.readBigUInt64LE() * BigInt(weights.reduce((sum, weight) => sum + weight, 0))) >> 64n;
  const environment = weights.findIndex((weight) => (ticket -= BigInt(weight)) < 0n);
  const samplerKeys = Array.from({ length: samples }, (_, i) => stream.subarray(40 + 32 * i, 72 + 32 * i));
  return { stream: stream.subarray(0, 72), environment, taskSeed: stream.subarray(8, 40), samplerKeys };
}

/** Bytes 8 * start and on of the sampler key's ChaCha20 stream. */
export function keystream(key, start, count) {
  const nonce = Buffer.alloc(16); // block counter, then the nonce of zeros
  nonce.writeUInt32LE(Math.floor(start / 8));
  const skipped = 8 * (start % 8);
  return createCipheriv("chacha20", key, nonce).update(Buffer.alloc(skipped + 8 * count)).subarray(skipped);
}

export function uniforms(key, start, count) {
  const bytes = keystream(key, start, count);
  const uniform = (_, t) => (bytes.readUInt32LE(8 * t + 4) * 2 ** 21 + (bytes.readUInt32LE(8 * t) >>> 11)) * 2 ** -53;
  return Float64Array.from({ length: count }, uniform);
}

function cumulate(logits, temperature) {
  const sums = new Float64Array(logits.length);
  const most = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  for (let i = 0, sum = 0; i < sums.length; i++) sums[i] = sum += Math.exp((logits[i] - most) / temperature);
  return { sums, most, total: sums.at(-1) };
}

export function choose(logits, temperature, uniform) {
  const { sums, most, total } = cumulate(logits, temperature);
  const token = sums.findIndex((sum) => sum > uniform * total);
  return { token, logprob: Math.fround((logits[token] - most) / temperature - Math.log(total)) };
}

/** How far a uniform lies from the token's interval, and the token's log-prob. */
export function distance(logits, temperature, uniform, token) {
  const { sums, most, total } = cumulate(logits, temperature);
  const [below, at] = [token ? sums[token - 1] : 0, uniform * total];
  const logprob = Math.fround((logits[token] - most) / temperature - Math.log(total));
  return { distance: Math.max(below - at, at - sums[token], 0) / total, logprob };
}

export const limitAt = (bound, weight, reference) =>
  bound.mean + (bound.limit - bound.mean) * Math.sqrt(Math.max(1, reference / Math.max(1, weight)));

/** The figures of a group's trained tokens; refused where a trainer would refuse them (VER-4, VER-5). */
export function verify(thresholds, trajectories) {
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const within = (code, value, limit) => {
    if (!(value <= limit)) throw new Refused(code, value, limit);
  };
  const parts = [{}, ...trajectories.filter((one) => one.reported.length)];
  for (const name of ["reported", "recomputed", "distances"]) parts[0][name] = parts.slice(1).flatMap((one) => one[name] ?? []);
  if (!parts[0].reported.length) throw new Refused("segments");
  const figures = parts.map(({ reported, recomputed, distances }) => {
    const weight = sum(recomputed.map((q) => (Number.isNaN(q) ? 1 : 1 - 0.9 * Math.exp(q))));
    const mad = sum(reported.map((p, i) => Math.abs(p - recomputed[i]))) / weight;
    return { weight, mad, seeded: distances?.length, distance: sum(distances ?? []) / weight, largest: Math.max(0, ...(distances ?? [])) };
  });
  const limit = (bound, weight) => limitAt(bound, weight, thresholds.tokens);
  for (const { mad, weight } of figures) within("logprob-mismatch", mad, limit(thresholds.logprobs, weight));
  for (const { distance, largest, weight, seeded } of figures) {
    if (!seeded) continue;
    within("sampling-mismatch", distance, limit(thresholds.distances, weight));
    within("sampling-mismatch", largest, thresholds.distance_max);
  }
  return figures[0];
}

const spelled = { 256: "<pad>", 257: "<bos>", 258: "<eos>" };
const utf8 = new TextDecoder("utf-8", { ignoreBOM: true });

export const sortDigits = {
  tokens: (text) => [...Buffer.from(text)],
  text: (tokens) => utf8.decode(Buffer.concat(Array.from(tokens, (id) => Buffer.from(id < 256 ? [id] : spelled[id])))),
  task(seed, length, level) {
    const stream = shake256(80, "nous/sort-digits/1\0", seed);
    const n = length + Math.floor((stream[0] * (Math.min(Number(level), 8) + 1)) / 256);
    const digits = Array.from(stream.subarray(1, 1 + n), (byte) => Math.floor((byte * 10) / 256));
    return { prompt: `sort ${digits.join("")}=`, solution: digits.sort().join("") };
  },
  score(solution, answer, ended) {
    const [right, given] = [[...solution], [...answer]];
    const hits = right.filter((digit, i) => digit === given[i]).length;
    return ended ? hits / Math.max(right.length, given.length) : 0;
  },
};

// y = W x: four sums side by side keep the processor busy
function times(y, w, x) {
  const n = x.length;
  for (let o = 0, at = 0; o < y.length; o++) {
    let [i, a, b, c, d] = [0, 0, 0, 0, 0];
    for (; i + 3 < n; i += 4, at += 4) {
      a += w[at] * x[i];
      b += w[at + 1] * x[i + 1];
      c += w[at + 2] * x[i + 2];
      d += w[at + 3] * x[i + 3];
    }
    for (; i < n; i++, at++) a += w[at] * x[i];
    y[o] = a + b + c + d;
  }
  return y;
}

function normed(y, x, w, eps) {
  let squares = 0;
  for (let i = 0; i < x.length; i++) squares += x[i] * x[i];
  const scale = 1 / Math.sqrt(squares / x.length + eps);
  for (let i = 0; i < x.length; i++) y[i] = w[i] * (x[i] * scale);
}

function rotated(x, turns) {
  const half = turns.length / 2; // of one head: cosines, then sines
  for (let at = 0; at < x.length; at += 2 * half) {
    for (let i = at, j = 0; j < half; i++, j++) {
      const [a, b] = [x[i], x[i + half]];
      x[i] = a * turns[j] - b * turns[half + j];
      x[i + half] = b * turns[j] + a * turns[half + j];
    }
  }
}

// One query row over the keys and values of positions 0 to p, head by head.
function attended(out, q, keys, values, { A, G, D }, scores, p) {
  const [row, root] = [G * D, Math.sqrt(D)];
  out.fill(0);
  for (let head = 0; head < A; head++) {
    const [from, shared] = [head * D, Math.floor((head * G) / A) * D];
    let [most, total] = [-Infinity, 0];
    for (let j = 0, at = shared; j <= p; j++, at += row) {
      let dot = 0;
      for (let i = 0; i < D; i++) dot += q[from + i] * keys[at + i];
      most = Math.max(most, (scores[j] = dot / root));
    }
    for (let j = 0; j <= p; j++) total += scores[j] = Math.exp(scores[j] - most);
    for (let j = 0, at = shared; j <= p; j++, at += row) {
      const share = scores[j] / total;
      for (let i = 0; i < D; i++) out[from + i] += share * values[at + i];
    }
  }
}

/** The tokens fed so far, as keys and values; a copy goes on by itself, so a group's samples share their prompt. */
class State {
  constructor(policy, from) {
    Object.assign(this, { policy, length: from?.length ?? 0 });
    this.cache = from ? from.cache.map((rows) => rows.slice()) : policy.layers.flatMap(() => [new Float32Array(0), new Float32Array(0)]);
  }
  copy() {
    return new State(this.policy, this);
  }
  /** Logits behind the last of these tokens; they hold until the next call for this policy. */
  feed(tokens) {
    for (const token of tokens) this.step(token);
    normed(this.policy.x, this.policy.h, this.policy.norm, this.policy.eps);
    return times(this.policy.logits, this.policy.embed, this.policy.x);
  }
  step(token) {
    const { H, D, layers, embed, eps, turn, h, x, q, o, y, gate, up, scores } = this.policy;
    const [p, row] = [this.length++, this.policy.G * D];
    const turns = turn(p);
    h.set(embed.subarray(token * H, token * H + H));
    layers.forEach((layer, l) => {
      for (const one of [2 * l, 2 * l + 1]) {
        if (this.cache[one].length > p * row) continue;
        const grown = new Float32Array(Math.max(64, 2 * p) * row);
        grown.set(this.cache[one]);
        this.cache[one] = grown;
      }
      normed(x, h, layer.input_layernorm, eps);
      rotated(times(q, layer.q_proj, x), turns);
      rotated(times(this.cache[2 * l].subarray(p * row, p * row + row), layer.k_proj, x), turns);
      times(this.cache[2 * l + 1].subarray(p * row, p * row + row), layer.v_proj, x);
      attended(o, q, this.cache[2 * l], this.cache[2 * l + 1], this.policy, scores, p);
      times(y, layer.o_proj, o);
      for (let i = 0; i < H; i++) h[i] += y[i];
      normed(x, h, layer.post_attention_layernorm, eps);
      times(gate, layer.gate_proj, x);
      times(up, layer.up_proj, x);
      for (let i = 0; i < gate.length; i++) gate[i] = (gate[i] / (1 + Math.exp(-gate[i]))) * up[i];
      times(y, layer.down_proj, gate);
      for (let i = 0; i < H; i++) h[i] += y[i];
    });
  }
}

/** A policy of the bytes of model.safetensors and the object in config.json. */
export function loadPolicy(bytes, config) {
  const [file, { hidden_size: H, intermediate_size: I, num_attention_heads: A, vocab_size: V }] = [readSafetensors(bytes), config];
  const [G, D] = [config.num_key_value_heads ?? A, config.head_dim ?? H / A];
  const tensor = (name, length) => widen(file.get(`model.${name}.weight`), length);
  const shapes = { input_layernorm: H, post_attention_layernorm: H };
  const parts = { "self_attn.q_proj": A * D * H, "self_attn.k_proj": G * D * H, "self_attn.v_proj": G * D * H,
    "self_attn.o_proj": H * A * D, "mlp.gate_proj": I * H, "mlp.up_proj": I * H, "mlp.down_proj": H * I, ...shapes };
  const layer = (_, l) => Object.fromEntries(Object.entries(parts).map(([name, length]) =>
    [name.split(".").at(-1), tensor(`layers.${l}.${name}`, length)]));
  const theta = config.rope_parameters.rope_theta;
  const rates = Array.from({ length: D / 2 }, (_, i) => Math.fround(theta ** ((-2 * i) / D)));
  const turn = (p) => ["cos", "sin"].flatMap((part) => rates.map((rate) => Math.fround(Math[part](Math.fround(p * rate)))));
  const room = (n) => new Float32Array(n);
  const policy = { H, G, A, D, V, eps: config.rms_norm_eps, turn, embed: tensor("embed_tokens", V * H), norm: tensor("norm", H),
    layers: Array.from({ length: config.num_hidden_layers }, layer), h: room(H), x: room(H), q: room(A * D), o: room(A * D), y: room(H),
    gate: room(I), up: room(I), logits: room(V), scores: new Float64Array(config.max_position_embeddings) };
  return Object.assign(policy, { start: () => new State(policy) });
}
