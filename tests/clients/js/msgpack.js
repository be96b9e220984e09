// Canonical msgpack (chapter 01): one value has one encoding, and everything else is refused with a code.
// Integers are numbers while those are exact, else bigints; floats are `Real`, bin is Uint8Array, maps are `Map`.
import { isUtf8 } from 'node:buffer'

const DEPTH = 8, ARRAY = 16384, MAP = 65536, TEXT = 4096

/** The one error of all readers: a code of assigned.md, and the two figures where a rule compares. */
export class Refused extends Error {
  constructor(code, measured = null, threshold = null) {
    super(code)
    Object.assign(this, { code, measured, threshold })
  }
}

export function must(test, code = 'wrong-type', measured, threshold) {
  if (!test) throw new Refused(code, measured, threshold)
}

/** A float 64: a plain number could not tell 1.0 from 1. */
export class Real {
  constructor(value) {
    must(Number.isFinite(value), 'not-finite')
    this.value = value
  }
}

/** The one value that `bytes` hold, of at most `values` values. Bin in it is a view of `bytes`. */
export function decode(bytes, limit = 1 << 24, values = MAP) {
  must(bytes.length <= limit, 'oversize')
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length)
  let at = 0
  function take(n) {
    must(n <= bytes.length - at, 'malformed')
    return (at += n) - n
  }
  function integer(k, least, type = 'Uint') { // of 2^k bytes; what is nearer to zero than least[k] has a shorter form
    const n = view[`get${k === 3 ? 'Big' : ''}${type}${8 << k}`](take(1 << k))
    must(type === 'Uint' ? n >= least[k] : n <= least[k], 'not-canonical')
    must(n < 2n ** 63n, 'out-of-range')
    return Number.isSafeInteger(Number(n)) ? Number(n) : n
  }
  const bin = (n) => new Uint8Array(bytes.buffer, bytes.byteOffset + take(n), n)
  function text(n) {
    must(n <= TEXT, 'out-of-range')
    const raw = bin(n)
    must(isUtf8(raw), 'malformed')
    return Buffer.from(raw).toString()
  }
  function elements(n, most, depth, read) { // a count is a claim: nothing is reserved that the bytes cannot hold
    must(depth <= DEPTH, 'too-deep')
    must(n <= most && n <= values, 'out-of-range')
    must(n <= bytes.length - at, 'malformed')
    return Array.from({ length: n }, read)
  }
  const array = (n, depth) => elements(n, ARRAY, depth, () => value(depth + 1))
  const map = (n, depth, before) => new Map(elements(n, MAP, depth, () => {
    const key = value(depth + 1)
    must(typeof key === 'string')
    must(before === undefined || Buffer.compare(before, Buffer.from(key)) < 0, 'not-canonical')
    before = Buffer.from(key)
    return [key, value(depth + 1)]
  }))
  function value(depth) {
    must(--values >= 0, 'out-of-range')
    const head = bytes[take(1)]
    if (head < 0x80) return head
    if (head < 0x90) return map(head & 15, depth)
    if (head < 0xa0) return array(head & 15, depth)
    if (head < 0xc0) return text(head & 31)
    if (head >= 0xe0) return head - 256
    if (head >= 0xde) return map(integer(head - 0xdd, [0, 16, 65536]), depth)
    if (head >= 0xdc) return array(integer(head - 0xdb, [0, 16, 65536]), depth)
    if (head >= 0xd9) return text(integer(head - 0xd9, [32, 256, 65536]))
    if (head >= 0xd0 && head <= 0xd3) return integer(head - 0xd0, [-33, -129, -32769, -(2 ** 31) - 1], 'Int')
    if (head >= 0xcc && head <= 0xcf) return integer(head - 0xcc, [128, 256, 65536, 2 ** 32])
    if (head >= 0xc4 && head <= 0xc6) return bin(integer(head - 0xc4, [0, 256, 65536]))
    if (head === 0xcb) return new Real(view.getFloat64(take(8)))
    must(head !== 0xca, 'not-canonical')
    must(head === 0xc0 || head === 0xc2 || head === 0xc3, 'malformed')
    return head === 0xc0 ? null : head === 0xc3
  }
  const result = value(1)
  must(at === bytes.length, 'malformed')
  return result
}

const rank = (n, ...bounds) => bounds.filter((bound) => n >= bound).length
function head(code, width = 0, n = 0) { // and the last `width` bytes of n as an integer of 64 bits
  const bytes = Buffer.alloc(9)
  bytes.writeBigUInt64BE(BigInt.asUintN(64, BigInt(n)), 1)
  return Buffer.concat([Buffer.of(code), bytes.subarray(9 - width)])
}
function sized(n, fixed, room, code, least = 0) { // a length: in the header below `room`, else in 2^k bytes behind it
  const k = Math.max(least, rank(n, 256, 65536))
  return n < room ? head(fixed | n) : head(code + k, 1 << k, n)
}
function integer(n) {
  must(n >= -(2n ** 63n) && n < 2n ** 63n, 'out-of-range')
  const k = n < 0 ? rank(-Number(n), 129, 32769, 2 ** 31 + 1) : rank(n, 256, 65536, 2 ** 32)
  return n >= -32 && n < 128 ? head(Number(n) & 255) : head((n < 0 ? 0xd0 : 0xcc) + k, 1 << k, n)
}
function text(item) {
  must(item.isWellFormed(), 'malformed')
  return Buffer.concat([sized(Buffer.byteLength(item), 0xa0, 32, 0xd9), Buffer.from(item)])
}
function write(item) {
  if (item === null) return head(0xc0)
  if (typeof item === 'boolean') return head(item ? 0xc3 : 0xc2)
  if (typeof item === 'bigint' || Number.isSafeInteger(item)) return integer(item)
  if (item instanceof Real) return head(0xcb, 8, new BigUint64Array(Float64Array.of(item.value).buffer)[0])
  if (typeof item === 'string') return text(item)
  if (item instanceof Uint8Array) return Buffer.concat([sized(item.length, 0, 0, 0xc4), item])
  if (Array.isArray(item)) return Buffer.concat([sized(item.length, 0x90, 16, 0xdb, 1), ...item.map(write)])
  must(item instanceof Map)
  const keys = [...item.keys()].sort((a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b)))
  return Buffer.concat([sized(item.size, 0x80, 16, 0xdd, 1), ...keys.flatMap((key) => [key, item.get(key)].map(write))])
}
/** The one encoding of `value`. What no reader would take is refused. */
export function encode(value) {
  const bytes = new Uint8Array(write(value))
  decode(bytes, Infinity, 4 * MAP) // the bounds of a reader are those of a writer
  return bytes
}
