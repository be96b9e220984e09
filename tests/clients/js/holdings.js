// Checkpoints that a client holds: blobs by hash in its home, fetched from whoever is connected (chapters 03, 09).
import { setTimeout as sleep } from 'node:timers/promises'
import { applyDelta, checkChain, checkChunk, chunksOf, readSafetensors } from './checkpoints.js'
import { Refused, must } from './msgpack.js'
import { hex, read, same, sha256, write } from './structures.js'

const chunks = (entries) => entries.flatMap(chunksOf)
const bytesOf = (parts) => parts.reduce((sum, { length }) => sum + length, 0)

export class Holdings {
  constructor(home, peer) {
    Object.assign(this, { home, peer, bad: new Set() })
  }
  get(hash) { // disks err: what is not what it was is not here
    const bytes = this.home.read(`blobs/${hex(hash)}`)
    return bytes && same(sha256(bytes), hash) ? bytes : undefined
  }
  put(hash, bytes) {
    if (!this.get(hash)) this.home.write(`blobs/${hex(hash)}`, bytes)
    return bytes
  }
  /** A blob from here, or from the first peer that has it; who sends another one is dropped (STR-3). */
  async fetch({ hash, length }) {
    const here = this.get(hash)
    if (here) return here
    for (let busy = true; busy; await sleep(500)) {
      busy = false
      for (const id of this.peer.peers.filter((one) => !this.bad.has(String(one)))) {
        try {
          const reply = read('blob-reply', await this.peer.ask(id, '/nous/blob/1', write('blob-request', { hash }), 4195328, 60))
          busy ||= !reply.data && reply.error === 'busy'
          if (!reply.data) continue
          must(length === undefined || reply.data.length === length, 'hash-mismatch')
          return this.put(hash, checkChunk(hash, reply.data))
        } catch (error) { // one that is slow or gone has done nothing wrong
          if (!(error instanceof Refused)) continue
          this.bad.add(String(id))
          this.peer.drop(id)
        }
      }
    }
    throw new Error(`no connected peer has the chunk ${hex(hash).slice(0, 16)}`)
  }
  async file(entry) {
    const parts = []
    for (const chunk of chunksOf(entry)) parts.push(await this.fetch(chunk))
    return Buffer.concat(parts)
  }
  /** The files of a checkpoint by path, chunks and tensors verified; by deltas from `held` where those are fewer bytes. */
  async files({ manifest }, held) {
    const files = await this.byDeltas(manifest, held).catch(() => new Map()) // for whatever reason (CKP-15)
    const deltas = files.size > 0
    for (const entry of manifest.files) if (!files.has(entry.path)) files.set(entry.path, await this.file(entry))
    const found = [...files].filter(([path]) => path.endsWith('.safetensors')).flatMap(([, bytes]) => [...readSafetensors(bytes)])
    must(found.length === manifest.tensors.size, 'hash-mismatch')
    for (const [name, { data }] of found) must(same(sha256(data), manifest.tensors.get(name) ?? ''), 'hash-mismatch')
    return { files, deltas }
  }
  async byDeltas(manifest, held) {
    const begin = manifest.chain?.findIndex((hash) => held && same(hash, held.hash)) ?? -1
    must(begin >= 0, 'not-found')
    const chain = checkChain(manifest, await Promise.all(manifest.chain.map((hash) => this.fetch({ hash }))))
    const steps = [...chain.slice(begin + 1), manifest]
    const missing = chunks(manifest.files).filter(({ hash }) => !this.get(hash))
    must(bytesOf(chunks(steps.flatMap((step) => step.deltas ?? []))) < bytesOf(missing), 'not-found')
    let files = held.files
    for (const step of steps) files = await this.step(files, step)
    return files
  }
  async step(parent, { files, deltas = [], tensors }) {
    const results = new Map()
    for (const entry of files) {
      const delta = deltas.find(({ path }) => path === entry.path), old = parent.get(entry.path)
      const bytes = delta && old ? applyDelta(old, await this.file(delta), tensors) : old ?? Buffer.alloc(0)
      const cut = chunksOf(entry).map(({ hash }, i) => [hash, bytes.subarray(i * entry.chunk, (i + 1) * entry.chunk)])
      const right = bytes.length === entry.size && cut.every(([hash, part]) => same(sha256(part), hash))
      if (right) cut.forEach(([hash, part]) => this.put(hash, part))
      results.set(entry.path, right ? bytes : await this.file(entry))
    }
    return results
  }
  /** Which chunks of a checkpoint are here (STR-4). */
  bitmap({ files, deltas = [] }) {
    const all = chunks([...files, ...deltas]), bits = Buffer.alloc(Math.ceil(all.length / 8))
    all.forEach(({ hash }, i) => (bits[i >> 3] |= this.get(hash) ? 1 << i % 8 : 0))
    return bits
  }
  /** Forgets what none of these checkpoints and their chains needs. */
  keep(checkpoints) {
    const chain = checkpoints.flatMap(({ manifest }) => manifest.chain ?? [])
    const links = chain.map((hash) => this.get(hash)).filter(Boolean).map((bytes) => read('checkpoint-manifest', bytes))
    const entries = checkpoints.flatMap(({ manifest }) => [...manifest.files, ...(manifest.deltas ?? [])])
    const needed = [...chunks([...entries, ...links.flatMap(({ deltas }) => deltas ?? [])]), ...checkpoints].map(({ hash }) => hash)
    const kept = new Set([...needed, ...chain].map(hex))
    for (const name of this.home.list('blobs')) if (!kept.has(name)) this.home.remove(`blobs/${name}`)
  }
}
