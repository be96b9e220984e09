// The adapter of chapter 14: questions as JSON lines on stdin, answers on stdout.
import { readFileSync } from 'node:fs'
import { createInterface } from 'node:readline'
import { applyDelta, checkChain, checkChunk, chunkOf, chunksOf, readSafetensors, widen } from './checkpoints.js'
import { hex, keyOf, openEnvelope, preimage, sha256, verify } from './envelopes.js'
import { entryOf, frame as framed, openEquivocation, peerIdOf, readEntry, secretOf, unframe,
  weightsHash } from './frames.js'
import { distance, limitAt, verify as measure } from './figures.js'
import { openReferenced, readGroup, readHello, readReference, unplanes } from './groups.js'
import { answered, largest } from './home.js'
import { Real, Refused, decode, encode, must } from './msgpack.js'
import { loadPolicy } from './policy.js'
import { pack } from './shapes.js'
import { filesHash, openCheckpoint, openReceipts, openRun, printable,
  readBitmap, readCheckpoint, readInvite, readRun, shardOf, topics, writeBitmap } from './structures.js'
import { assign, choose, keystream, planes as planesOf, sortDigits, taskSeed, textOf, tokensOf,
  uniforms } from './tasks.js'

const HEX = ['beacon', 'body', 'bytes', 'checkpoint', 'data', 'delta', 'entry', 'envelope', 'frame', 'hash', 'have',
  'key', 'manifest', 'parent', 'planes', 'proof', 'reply', 'run', 'seed', 'signature']
const bytesOf = (value) => typeof value === 'string' ? Buffer.from(value, 'hex')
  : Buffer.concat(value.map(([piece, count]) => Buffer.alloc(piece.length / 2 * count, piece, 'hex')))
const numbers = (list, absent) => list.map((value) => value ?? absent)
const ofRun = ({ manifest }) => readRun(manifest)

function tagged(value) {
  if (value === null || typeof value === 'boolean') return value
  if (typeof value === 'string') return { text: value }
  if (value instanceof Real) return { float: Object.is(value.value, -0) ? '-0.0' : String(value.value) }
  if (value instanceof Uint8Array) return { bin: value }
  if (value instanceof Map) return { map: [...value].map(([key, item]) => [key, tagged(item)]) }
  return Array.isArray(value) ? { array: value.map(tagged) } : { int: String(value) }
}
const valueOf = (body) => tagged(decode(body, 1 << 27, 1 << 18)) // with the keys that no structure names

function plain(key) { // `this[key]`, since a buffer says itself what it is in JSON
  const value = this[key]
  if (value instanceof Uint8Array) return hex(value)
  return ArrayBuffer.isView(value) ? [...value] : typeof value === 'bigint' ? Number(value) : value
}

function checkFile(entry, data) {
  must(data.length === entry.size, 'size-mismatch')
  let at = 0
  for (const { hash, length } of chunksOf(entry)) checkChunk(hash, data.subarray(at, at += length), length)
}

// The default of the release that this client lies in: a volunteer fetches it, a vector does not bring it.
const ours = (name) => readFileSync(new URL(`../../../trainer/default/${name}`, import.meta.url))

const OPS = {
  client: () => ({ name: 'nous-volunteer-js', version: '0.1.0' }),
  display: ({ text }) => ({ held: [...text].flatMap((one, i) => printable(one) === one ? [] : [i]) }),
  encoding({ bytes, limit }) {
    const value = decode(bytes, limit ?? undefined)
    return { value: tagged(value), bytes: encode(value) }
  },
  identities({ seed }) {
    const key = keyOf(secretOf(seed))
    return { key, peer_id: peerIdOf(key) }
  },
  signatures: ({ key, message, signature }) => verify(key, bytesOf(message), signature),
  envelopes({ envelope, now }) {
    const { content, signed, ...opened } = openEnvelope(envelope, { now: now ?? undefined })
    const told = { head: tagged(decode(signed)), preimage: preimage(signed), content_sha256: sha256(content) }
    return { ...opened, signed, ...told }
  },
  streams({ message, frame }) {
    unframe(message, frame)
    const head = frame.subarray(0, 4), value = decode(frame.subarray(4, 4 + head.readUInt32BE()), 1 << 26)
    return { value: tagged(value), frame: Buffer.concat([head, encode(value)]) }
  },
  bitmaps({ have, chunks }) {
    const held = readBitmap(have, chunks)
    return { held, have: writeBitmap(held, chunks) }
  },
  blobs: ({ hash, reply }) => (
    { request: framed(pack({ hash })), data: chunkOf(unframe('blob-reply', reply), hash) }),
  shards: ({ key, shards }) => ({ shard: shardOf(key, shards) }),
  runs({ envelope, run }) {
    const { content } = openRun(envelope, run), { rollouts, checkpoints, receipts } = topics(run)
    return { manifest: content, value: valueOf(content), topics: { 'rollouts/0': rollouts(0), checkpoints, receipts } }
  },
  invites: ({ text }) => readInvite(text),
  tasks({ run, checkpoint, beacon, key, counter, weights, samples }) {
    const seed = taskSeed(run, checkpoint, beacon, key, counter), drawn = assign(seed, weights, samples)
    return { ...drawn, seed, task_seed: drawn.taskSeed, sampler_keys: drawn.samplerKeys }
  },
  uniforms: (q) => ({ keystream: keystream(q.key, q.start, q.count), uniforms: uniforms(q.key, q.start, q.count) }),
  turns({ key, turns }) {
    let at = 0
    const drawn = turns.filter(([, sampled]) => sampled).map(([count]) => uniforms(key, (at += count) - count, count))
    return { uniforms: drawn }
  },
  choices: (q) => choose(numbers(q.logits, -Infinity), q.temperature, q.uniform),
  distances: (q) => distance(numbers(q.logits, -Infinity), q.temperature, q.uniform, q.token),
  arrays({ planes, form }) {
    const values = unplanes(planes, form)
    return { values, planes: planesOf(values, form) }
  },
  rollouts: (q) => readGroup(q.body, ofRun(q)) && { value: valueOf(q.body) },
  references: (q) => readReference(q.body, ofRun(q)) && { value: valueOf(q.body) },
  'references-fetched': (q) => (
    { group: openReferenced(readReference(q.body, ofRun(q)), q.frame).content, value: valueOf(q.body) }),
  limits: (q) => ({ at: limitAt(q, q.tokens, q.reference) }),
  verification(q) {
    const part = (one) => Object.fromEntries(Object.entries(one).map(([name, list]) => [name, numbers(list, NaN)]))
    return measure(ofRun(q).thresholds, q.trajectories.map(part))
  },
  checkpoints(q) {
    const { content, hash, manifest: { files, tensors } } = openCheckpoint(q.envelope, q.run, ofRun(q))
    q.contents?.forEach((data, i) => checkFile(files[i], bytesOf(data)))
    const hashes = { hash, files_hash: filesHash(files), weights_hash: weightsHash(tensors) }
    return { manifest: content, value: valueOf(content), ...hashes }
  },
  chunks: ({ data, hash }) => ({ data: checkChunk(hash, data) }),
  trees({ entry, data }) {
    const file = readEntry(entry)
    checkFile(file, data)
    return { entry: entryOf(file.path, data, file.chunk) }
  },
  chains: ({ manifest, chain }) => void checkChain(readCheckpoint(manifest), chain.map(bytesOf)),
  equivocations: (q) => openEquivocation(q.proof, q.run, ofRun(q)),
  deltas({ parent, delta, tensors }) {
    const hashes = new Map(Object.entries(tensors).map(([name, hash]) => [name, bytesOf(hash)]))
    return { result: applyDelta(parent, delta, hashes) }
  },
  receipts: (q) => ({ body: openReceipts(q.envelope, q.run, ofRun(q)).content }),
  greetings({ kept, steps }) {
    let answers = kept == null ? {} : { kept }
    return { steps: steps.map(({ trainer, newest, version, threshold }) => {
      answers = answered(answers, trainer, version ?? (threshold === null ? null : threshold - 1), newest)
      return { h: largest(answers) }
    }) }
  },
  hellos: ({ body }) => readHello(body) && { body: encode(decode(body)) },
  'sort-digits'({ seed, length, level }) {
    const { prompt, solution } = sortDigits.task(seed, length, level)
    return { prompt, tokens: tokensOf(prompt), solution }
  },
  'sort-digits-score': ({ seed, length, level, answer, ended }) => (
    { reward: sortDigits.score(sortDigits.task(seed, length, level).solution, answer, ended) }),
  'sort-digits-text': ({ tokens }) => ({ text: textOf(tokens) }),
  forward: ({ config, weights, tokens }) => ({ logits: loadPolicy(bytesOf(weights), config).start().feed(tokens) }),
  'nous-default'({ text }) {
    const file = ours('model.safetensors'), policy = loadPolicy(file, JSON.parse(ours('config.json')))
    const tensors = [...readSafetensors(file)].sort(([a], [b]) => a < b ? -1 : 1).map(([, tensor]) => tensor)
    const values = tensors.map((tensor) => new Uint8Array(widen(tensor, tensor.shape).buffer)), tokens = tokensOf(text)
    return { weights: sha256(...values), tokens, logits: policy.start().feed(tokens) }
  },
}

function answer(line) {
  let question
  try {
    question = JSON.parse(line)
    for (const name of HEX) if (name in question) question[name] = bytesOf(question[name])
  } catch { return { error: 'bad-question' } }
  try {
    return Object.hasOwn(OPS, question.op) ? { ok: OPS[question.op](question) ?? {} } : { unsupported: true }
  } catch (error) {
    return error instanceof Refused ? { error: error.code, ...error } : { error: 'adapter-failed', note: String(error) }
  }
}

for await (const line of createInterface({ input: process.stdin }))
  process.stdout.write(`${JSON.stringify(answer(line), plain)}\n`)
