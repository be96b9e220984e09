// Groups and references of others (chapter 07), which a volunteer never reads. Only the adapter asks for it.
import { same, sha256, unzip } from './envelopes.js'
import { must } from './msgpack.js'
import { bin, dict, hash, int, is, list, map, name, one, real, row, structure, text, whole } from './shapes.js'
import { FORMS } from './tasks.js'

const MAX_GROUP = 1 << 26, TOKENS = 1 << 20, MAGNITUDE = 1e6, counter = int(0, 2 ** 32 - 1)
const amount = int(1, MAX_GROUP)
const engine = map({ name, version: name, dtype: name, device: name })
const segment = row({ length: int(1, TOKENS), role: int(0, 4), trained: one(true, false) })
const trajectory = map({ tokens: bin(), segments: list(segment, 1), logprobs: bin(), reward: real(),
  finish: one('stop', 'length', 'cut'), 'agent?': name, 'components?': dict(real(), 0, 64), 'advantages?': bin(),
  'advantage?': real(), 'parents?': list(is(whole)) })
const readAny = structure(map({ checkpoint: hash, counter, env: text(1), engine,
  trajectories: list(trajectory, 1, 1024) }), MAX_GROUP)
const readShape = structure(map({ checkpoint: hash, counter, hash, size: amount, packed: amount,
  chunk: int(1 << 14, 1 << 22), chunks: bin() }), 135168)
export const readHello = structure(map({ agent: text(0, 64), engine }), 4096)

function fromHalf(half) { // a single whose exponent is 112 more
  const sign = (half & 0x8000) << 16, bits = sign | (half & 0x7fff) << 13
  const single = (pattern) => new Float32Array(Uint32Array.of(pattern).buffer)[0]
  return Math.abs(single(bits)) < 2 ** -96 ? single(bits) * 2 ** 112 : single(bits | 0x7f800000) // no finite number
}
export function unplanes(bytes, form) {
  const width = FORMS[form].BYTES_PER_ELEMENT, count = bytes.length / width
  must(Number.isInteger(count))
  const raw = Uint8Array.from(bytes, (_, i) => bytes[i % width * count + Math.floor(i / width)])
  return form === 'f16' ? Float32Array.from(new Uint16Array(raw.buffer), fromHalf) : new FORMS[form](raw.buffer)
}

/** A group in the form of ROL-1 to ROL-13. */
export function readGroup(body, manifest) {
  const group = readAny(body), place = manifest.environments.find(({ id }) => id === group.env)
  must(group.trajectories.length >= manifest.group, 'group-size')
  must(place !== undefined, 'wrong-environment')
  for (const trajectory of group.trajectories) checkTrajectory(trajectory, manifest, place.advantages)
  return group
}
function checkTrajectory({ segments, parents, reward, finish, advantage, ...arrays }, { sampling, model }, allowed) {
  const tokens = unplanes(arrays.tokens, 'u32'), stops = new Set(sampling.stop)
  let at = 0
  const spans = segments.map(({ length }) => tokens.subarray(at, at += length))
  const trained = segments.reduce((sum, segment) => sum + (segment.trained ? segment.length : 0), 0)
  must(tokens.length > 0 && at === tokens.length && !segments[0].trained, 'segments')
  must(tokens.length <= model.context && trained <= sampling.max_tokens, 'too-long')
  must(tokens.every((token) => token < model.vocabulary), 'token-range')
  must(arrays.logprobs.length === trained * FORMS[sampling.logprobs].BYTES_PER_ELEMENT, 'logprobs')
  const logprobs = unplanes(arrays.logprobs, sampling.logprobs)
  must(logprobs.every(Number.isFinite), 'not-finite')
  must(logprobs.every((value) => value <= 0), 'logprobs')
  const many = arrays.advantages && unplanes(arrays.advantages, 'f32'), given = [...many ?? [], advantage ?? 0]
  must(!many || advantage === undefined && many.length === trained, 'advantages')
  must(allowed || !many && advantage === undefined, 'advantages')
  must(given.every(Number.isFinite), 'not-finite')
  must([reward, ...given].every((value) => Math.abs(value) <= MAGNITUDE), 'out-of-range')
  const early = (span, i) => segments[i].trained && span.subarray(0, -1).some((token) => stops.has(token))
  const full = trained === sampling.max_tokens || tokens.length === model.context
  const end = segments.at(-1).trained && stops.has(tokens.at(-1)) ? 'stop' : full ? 'length' : 'cut'
  must(!spans.some(early) && finish === end && (end !== 'cut' || trained > 0), 'finish')
  const fits = (parent, i) => parent < i && parent >= (segments[i].trained ? 0 : -1)
  must(parents === undefined || parents.length === segments.length && parents.every(fits), 'segments')
}
/** ROL-14, ROL-15. */
export function readReference(body, { group, model }) {
  const reference = readShape(body), { size, packed, chunk, chunks } = reference
  must(Math.max(size, packed) <= 65536 + 16 * group * (32 * model.context + 4096), 'oversize')
  must(chunks.length === 32 * Math.ceil(packed / chunk), 'size-mismatch')
  return reference
}
/** ROL-17: the group of a reference, from its whole frame. */
export function openReferenced({ checkpoint, counter, hash, size, packed, chunk, chunks }, frame) {
  must(frame.length === packed, 'size-mismatch')
  for (let at = 0, i = 0; at < packed; at += chunk, i += 32)
    must(same(sha256(frame.subarray(at, at + chunk)), chunks.subarray(i, i + 32)), 'hash-mismatch')
  const content = unzip(frame, size)
  must(same(sha256(content), hash), 'hash-mismatch')
  const group = readAny(content)
  must(same(group.checkpoint, checkpoint) && group.counter === counter, 'hash-mismatch')
  return { content, group }
}

