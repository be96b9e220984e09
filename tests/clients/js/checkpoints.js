// Files of a checkpoint (chapter 09): chunks, chains, safetensors, deltas.
import { same, sha256, unzip } from './envelopes.js'
import { Refused, must } from './msgpack.js'
import { readCheckpoint, readDeltaHeader } from './structures.js'

const WIDTHS = { BOOL: 1, U8: 1, I8: 1, F8_E4M3: 1, F8_E5M2: 1, F8_E8M0: 1, U16: 2, I16: 2, F16: 2, BF16: 2, U32: 4,
  I32: 4, F32: 4, U64: 8, I64: 8, F64: 8, C64: 8 }
const EXPONENTS = { BF16: [7, 0xff], F16: [10, 0x1f], F32: [23, 0xff] } // lowest bit, mask
const SEGMENT = 1 << 20, MAX_HEADER = 16_000_000, MAX_BRACKETS = 196_610, MAGIC = Buffer.from('nous/delta/1\0')
const view = (bytes) => Buffer.from(bytes.buffer, bytes.byteOffset, bytes.length)

export function checkChunk(hash, data, length = data.length) {
  must(data.length === length, 'size-mismatch')
  must(same(sha256(data), hash), 'hash-mismatch')
  return data
}
/** STR-3: the chunk of a reply; its `length` where it is known. */
export function chunkOf({ data, error }, hash, length = data?.length) {
  must(data !== undefined, error === 'busy' ? 'busy' : 'not-found')
  return checkChunk(hash, data, length)
}
/** The chunks of a file entry in their order. */
export const chunksOf = ({ size, chunk, chunks }) => Array.from({ length: chunks.length / 32 }, (_, i) =>
  ({ hash: chunks.subarray(32 * i, 32 * i + 32), length: Math.min(chunk, size - i * chunk) }))
/** The manifests of a delta's chain, from what was fetched for their hashes (CKP-14). */
export const checkChain = ({ version, chain = [] }, fetched) => chain.map((hash, i) => {
  const element = readCheckpoint(checkChunk(hash, fetched[i])), before = element.chain ?? []
  must(BigInt(element.version) + BigInt(chain.length - i) === BigInt(version) && element.kind === 'full' === (i === 0))
  must(before.length === i && before.every((one, j) => same(one, chain[j])))
  return element
})

// JSON.parse says whether it is JSON, but rounds integers and keeps one of two equal names: both are looked at apart.
function readHeader(bytes) {
  const holds = (test) => must(test, 'malformed'), isText = (value) => typeof value === 'string' && value.isWellFormed()
  const isObject = (value) => typeof value === 'object' && value && !Array.isArray(value)
  const isList = (value) => Array.isArray(value) && value.every((n) => typeof n === 'number')
  try {
    const text = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes), members = JSON.parse(text)
    let names = 0
    for (const [token, isName] of text.replace(/\\./g, '').matchAll(/"[^"]*"(\s*:)?|[-+.\w]+/g)) {
      if (isName) names++
      else holds(token[0] === '"' || /^(-0|\d+)$/.test(token) && BigInt(token) < 1n << 63n)
    }
    holds(isObject(members) && Object.values(members).every(isObject))
    holds(names === [members, ...Object.values(members)].reduce((n, object) => n + Object.keys(object).length, 0))
    const { __metadata__: notes = {}, ...tensors } = members
    holds([Object.keys(members), Object.entries(notes)].flat(2).every(isText))
    for (const { dtype, shape, data_offsets: offsets, ...rest } of Object.values(tensors))
      holds(isText(dtype) && isList(shape) && isList(offsets) && offsets.length === 2 && Object.keys(rest).length === 0)
    return Object.entries(tensors)
  } catch {
    throw new Refused('malformed')
  }
}

/** The tensors of a safetensors file by name, in the order in which they lie (DLT-1); `data` are views of the file. */
export function readSafetensors(bytes) {
  const file = view(bytes)
  must(file.length >= 8, 'size-mismatch')
  const start = 8 + Number(file.readBigUInt64LE()), header = file.subarray(8, start)
  must(start <= 8 + MAX_HEADER, 'oversize')
  must(start <= file.length, 'size-mismatch')
  must(header.reduce((n, byte) => n + (byte === 0x5b || byte === 0x7b), 0) <= MAX_BRACKETS, 'out-of-range')
  const tensors = readHeader(header).map(([name, { dtype, shape, data_offsets: [begin, end] }]) => {
    must(Object.hasOwn(WIDTHS, dtype), 'unknown-dtype')
    const width = WIDTHS[dtype], size = shape.includes(0) ? 0 : shape.reduce((a, b) => a * b, width)
    return [name, { dtype, shape, width, size, begin, end, data: file.subarray(start + begin, start + end) }]
  }).sort(([, a], [, b]) => a.begin - b.begin || a.end - b.end)
  const end = tensors.reduce((at, [, one]) => {
    must(one.begin === at && one.end === at + one.size, 'size-mismatch')
    return one.end
  }, 0)
  must(start + end === file.length, 'size-mismatch')
  return new Map(tensors)
}

/** The values of a tensor in float 32; it has to be there and have this shape. */
export function widen(tensor, shape) {
  must(['F32', 'BF16'].includes(tensor?.dtype) && String(tensor.shape) === String(shape))
  const { data, width, size } = tensor
  const bits = (_, i) => width === 4 ? data.readUInt32LE(4 * i) : data.readUInt16LE(2 * i) << 16
  return new Float32Array(Uint32Array.from({ length: size / width }, bits).buffer)
}

// What the content of a `gap` makes of the elements in `target`.
function applyGaps(target, content, { dtype, width }) {
  const length = target.length / width, n = content.readUInt32BE(), limit = content[4], half = 2 ** (8 * width - 1)
  must(n > 0 && n <= length, 'out-of-range')
  const steps = content.subarray(5, 5 + width * n), gaps = content.subarray(5 + width * n)
  must(gaps.reduce((ends, byte) => ends + (byte < 255), 0) === n && gaps.at(-1) < 255, 'size-mismatch')
  const [shift, mask] = EXPONENTS[dtype], bits = (i) => target.readUIntLE(i * width, width)
  const rank = (_, i) => Math.min(bits(i) >>> shift & mask, limit) * SEGMENT + i // 8 bits above the 20 of a place
  const order = Uint32Array.from({ length }, rank).sort()
  const turned = (x) => x >= half ? 2 * half - 1 - x : x + half, back = (y) => y >= half ? y - half : 2 * half - 1 - y
  for (let i = 0, k = 0, place = 0; i < n; i++, place++) {
    do place += gaps[k]; while (gaps[k++] === 255)
    let step = 0
    for (let plane = width - 1; plane >= 0; plane--) step = 256 * step + steps[plane * n + i]
    must(place < length && step > 0, 'out-of-range')
    const at = order[place] % SEGMENT, change = step % 2 ? -(step + 1) / 2 : step / 2
    target.writeUIntLE(back((turned(bits(at)) + change + 2 * half) % (2 * half)), at * width, width)
  }
}

// The records of a delta, each with the elements that it changes; checked before a payload is read (DLT-2, DLT-3).
function readDelta(bytes, tensors) {
  const file = view(bytes)
  must(file.length >= 17 && same(file.subarray(0, 13), MAGIC), 'malformed')
  let at = 17 + file.readUInt32BE(13)
  must(at <= 17 + MAX_HEADER, 'oversize')
  must(at <= file.length, 'size-mismatch')
  const records = [...readDeltaHeader(file.subarray(17, at)).tensors].flatMap(([name, list]) => {
    const tensor = tensors.get(name)
    must(tensor)
    return list.map(({ segment, encoding, size }, i) => {
      const room = SEGMENT * tensor.width, from = Number(segment) * room
      const target = tensor.data.subarray(from, from + room)
      must(encoding !== 'gap' || EXPONENTS[tensor.dtype])
      must(from < tensor.size && (i === 0 || segment > list[i - 1].segment), 'out-of-range')
      return { tensor, encoding, target, payload: file.subarray(at, at += size) }
    })
  })
  must(at === file.length, 'size-mismatch')
  return records
}

/** The file that a delta makes of its parent's (DLT-4 to DLT-8); `hashes` are those of the tensors by name. */
export function applyDelta(parent, delta, hashes) {
  const result = Buffer.from(parent), tensors = readSafetensors(result) // a copy: steps are relative to the parent
  for (const { tensor, encoding, target, payload } of readDelta(delta, tensors)) {
    const { width } = tensor, full = target.length, length = full / width, gap = encoding === 'gap'
    const [least, most] = gap ? [width + 6, 5 + full + length + Math.floor(length / 255)] : [full, full]
    const content = view(unzip(payload, null, (size) => must(size >= least && size <= most, 'size-mismatch')))
    if (gap) applyGaps(target, content, tensor)
    else for (let plane = 0, at = 0; plane < width; plane++)
      for (let i = plane; i < full; i += width) target[i] = content[at++] ^ (encoding === 'xor' ? target[i] : 0)
  }
  for (const [name, { data }] of tensors) checkChunk(hashes.get(name) ?? MAGIC, data) // without a hash: none is like it
  return result
}
