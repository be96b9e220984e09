// Types of the structures: a type is a function from a decoded value to what a reader gets; it refuses all other values
// with `wrong-type`. What is read has only keys that its type names; maps with keys of strangers stay `Map`s.
import { Real, decode, encode, must } from './msgpack.js'

const MAX_INT = 2n ** 63n - 1n
const itself = (value) => value
const length = (value) => value.length
export const isMap = (value) => value instanceof Map
export const whole = (value) => typeof value === 'number' || typeof value === 'bigint'
const number = (value) => value instanceof Real ? value.value : whole(value) ? Number(value) : NaN
const isReal = (value) => !isNaN(number(value))

export const is = (test, as = itself) => (value) => {
  must(test(value))
  return as(value)
}
const within = (test, size, least, most, as) => is((v) => test(v) && size(v) >= least && size(v) <= most, as)
export const int = (least, most = MAX_INT) => within(whole, itself, least, most)
export const bin = (least = 0, most = Infinity) => within((value) => value instanceof Uint8Array, length, least, most)
export const text = (least = 0, most = Infinity, form = /^/) => // characters are code points
  within((value) => typeof value === 'string' && form.test(value), (value) => [...value].length, least, most)
export const real = (least = -Infinity, most = Infinity) => within(isReal, number, least, most, number)
export const one = (...values) => is((value) => values.includes(value))
export const nil = (of) => (value) => value === null ? null : of(value)
export const list = (of, least = 0, most = Infinity) =>
  within(Array.isArray, length, least, most, (value) => value.map((item) => of(item)))
export const dict = (of, least = 0, most = Infinity) => within(isMap, (value) => value.size, least, most,
  (value) => new Map([...value].map(([key, item]) => [key, of(item)])))

const record = (shape, get, check = itself) => (value) => {
  const result = {}
  Object.entries(shape).forEach(([key, of], index) => {
    const name = key.replace('?', ''), item = get(value, name, index) // a key that ends in ? may be absent
    if (item !== undefined || name === key) result[name] = of(item)
  })
  check(result)
  return result
}
export const map = (shape, check) => is(isMap, record(shape, (value, name) => value.get(name), check))
export const row = (shape) => is(Array.isArray, record(shape, (value, name, index) => value[index])) // or more [ENC-10]

export const hash = bin(32, 32), key = hash, signature = bin(64, 64), uint = int(0)
export const name = text(0, 256), named = text(1, 256)
export const scalar = is((value) => ['boolean', 'string'].includes(typeof value) || isReal(value))

/** A reader of the bytes of a structure, of at most `limit` bytes and `values` values. */
export const structure = (of, limit, values) =>
  Object.assign((bytes, most = limit) => of(decode(bytes, most, values)), { limit })

function valueOf(item) {
  if (typeof item === 'number') return Number.isSafeInteger(item) ? item : new Real(item)
  if (Array.isArray(item)) return item.map(valueOf)
  if (item === null || typeof item !== 'object' || item instanceof Uint8Array) return item
  const entries = isMap(item) ? [...item] : Object.entries(item).filter(([, held]) => held !== undefined)
  return new Map(entries.map(([key, held]) => [key, valueOf(held)]))
}
/** The bytes of a structure: objects and `Map`s are maps, rows are arrays. */
export const pack = (item) => encode(valueOf(item))
