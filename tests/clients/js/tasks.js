// Groups of the volunteer: tasks and seeded draws (chapter 06), sort-digits, and what is published (chapter 07).
import { createCipheriv, createHash } from 'node:crypto'
import { setImmediate as turn } from 'node:timers/promises'
import { must } from './msgpack.js'

export const ENGINE = { name: 'nous-volunteer-js', version: '0.1.0', dtype: 'float32', device: 'cpu' }
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

export function intervals(logits, temperature) {
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

/** The settings of an environment that this client plays; else undefined. */
export function settingsOf({ id, version, config = new Map() }) {
  const { length = 4, ...others } = Object.fromEntries(config)
  const known = id === 'sort-digits' && version === '1' && Object.keys(others).length === 0
  return known && Number.isInteger(length) && length >= 1 && length <= 64 ? { length } : undefined
}

// ROL-10: numbers in byte planes. A half is a single whose exponent is 112 less, without the lower 13 bits.
export const FORMS = { u32: Uint32Array, f32: Float32Array, f16: Uint16Array }
function toHalf(value) { // the nearest, ties to even
  const [bits] = new Uint32Array(Float32Array.of(value * 2 ** -112).buffer)
  const size = (bits & 0x7fffffff) + 0xfff + (bits >> 13 & 1) >> 13
  return bits >> 16 & 0x8000 | Math.min(size, Number.isNaN(value) ? 0x7e00 : 0x7c00)
}
export function planes(values, form) {
  const flat = FORMS[form].from(values, form === 'f16' ? toHalf : undefined), raw = new Uint8Array(flat.buffer)
  return raw.map((_, i) => raw[i % flat.length * flat.BYTES_PER_ELEMENT + Math.floor(i / flat.length)])
}

// The tokens of one trajectory, each with its log-prob, and whether a stop token ended it.
async function sample(state, first, draws, { temperature, stop }) {
  const chosen = []
  const ended = () => stop.includes(chosen.at(-1)?.token)
  while (!ended() && chosen.length < draws.length) {
    const logits = chosen.length ? state.feed([chosen.at(-1).token]) : first
    chosen.push(choose(logits, temperature, draws[chosen.length]))
    await turn() // a long group holds up no connection
  }
  return { tokens: chosen.map(({ token }) => token), logprobs: chosen.map(({ logprob }) => logprob), ended: ended() }
}
/** The group of a task; none where this client does not have its environment, or its prompt leaves no room. */
export async function makeGroup({ run, id, key }, { hash, manifest, policy }, counter) {
  const { environments, sampling, model } = run
  const seed = taskSeed(id, hash, manifest.beacon, key, counter)
  const drawn = assign(seed, environments.map(({ weight }) => weight), run.group)
  const place = environments[drawn.environment], settings = settingsOf(place)
  if (!settings) return undefined
  const { prompt, solution } = sortDigits.task(drawn.taskSeed, settings.length, manifest.levels?.get(place.id) ?? 0)
  const asked = tokensOf(prompt), most = Math.min(sampling.max_tokens, model.context - asked.length)
  if (most < 1) return undefined
  const start = policy.start(), first = start.feed(asked).slice(), trajectories = []
  for (const samplerKey of drawn.samplerKeys) {
    const { tokens, logprobs, ended } = await sample(start.copy(), first, uniforms(samplerKey, 0, most), sampling)
    const reward = sortDigits.score(solution, textOf(ended ? tokens.slice(0, -1) : tokens), ended)
    trajectories.push({ tokens: planes([...asked, ...tokens], 'u32'), logprobs: planes(logprobs, sampling.logprobs),
      segments: [[asked.length, 4, false], [tokens.length, 2, true]], finish: ended ? 'stop' : 'length', reward })
  }
  return { checkpoint: hash, counter, env: place.id, engine: ENGINE, trajectories }
}
