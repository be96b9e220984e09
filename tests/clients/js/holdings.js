// Checkpoints that a client holds: blobs by hash in its home, fetched from whoever is connected (chapters 03, 09).
import { setTimeout as sleep } from 'node:timers/promises'
import { applyDelta, checkChain, checkChunk, chunksOf, readSafetensors } from './checkpoints.js'
import { Refused, must } from './msgpack.js'
import { hex, read, same, sha256, write, writeBitmap } from './structures.js'

const chunks = (entries) => entries.flatMap(chunksOf)
const total = (parts) => parts.reduce((sum, { length }) => sum + length, 0)

export class Holdings {
  constructor(home, peer) { Object.assign(this, { home, peer, bad: new Set() }) }
  get(hash) { // disks err: what is not what it was is not here
    const bytes = this.home.read(`blobs/${hex(hash)}`)
    return bytes && same(sha256(bytes), hash) ? bytes : undefined
  }
  put(hash, bytes) { if (!this.get(hash)) this.home.write(`blobs/${hex(hash)}`, bytes) }
  /** A blob from here, or from the first peer that has it; who sends another one is dropped (STR-3). */
  async fetch({ hash, length }) {
    for (let busy = true; busy && !this.get(hash); await sleep(busy ? 500 : 0)) {
      busy = false
      for (const id of this.peer.peers.filter((one) => !this.bad.has(String(one)))) try {
        const raw = await this.peer.ask(id, '/nous/blob/1', write('blob-request', { hash }), 4195328, 60)
        const { data, error } = read('blob-reply', raw)
        busy ||= !data && error === 'busy'
        if (!data) continue
        must((length ?? data.length) === data.length, 'hash-mismatch')
        return this.put(hash, checkChunk(hash, data)) ?? data
      } catch (error) { // one that is slow or gone has done nothing wrong
        if (error instanceof Refused) this.peer.drop(id, this.bad.add(String(id)))
      }
    }
    return this.get(hash) ?? Promise.reject(new Error(`no connected peer has the chunk ${hex(hash).slice(0, 16)}`))
  }
  async file(entry) {
    const parts = []
    for (const chunk of chunksOf(entry)) parts.push(await this.fetch(chunk))
    return Buffer.concat(parts)
  }
  /** The files of a checkpoint, chunks and tensors verified; by deltas from `held` where those are fewer bytes. */
  async files({ manifest }, held) {
    const files = await this.byDeltas(manifest, held).catch(() => new Map()), deltas = files.size > 0 // CKP-15
    for (const entry of manifest.files) if (!files.has(entry.path)) files.set(entry.path, await this.file(entry))
    const weights = [...files].filter(([path]) => path.endsWith('.safetensors')).map(([, bytes]) => bytes)
    const found = new Map(weights.flatMap((bytes) => [...readSafetensors(bytes)]))
    must(found.size === manifest.tensors.size, 'hash-mismatch')
    for (const [name, { data }] of found) must(same(sha256(data), manifest.tensors.get(name) ?? ''), 'hash-mismatch')
    return { files, deltas }
  }
  async byDeltas(manifest, held) {
    const begin = manifest.chain?.findIndex((hash) => held && same(hash, held.hash)) ?? -1
    must(begin >= 0, 'not-found')
    const chain = checkChain(manifest, await Promise.all(manifest.chain.map((hash) => this.fetch({ hash }))))
    const steps = [...chain.slice(begin + 1), manifest], deltas = chunks(steps.flatMap((step) => step.deltas ?? []))
    must(total(deltas) < total(chunks(manifest.files).filter(({ hash }) => !this.get(hash))), 'not-found')
    let files = held.files
    for (const step of steps) files = await this.step(files, step)
    return files
  }
  async step(parent, { files, deltas = [], tensors }) { // what a delta does not make as it should is fetched
    const results = new Map()
    for (const entry of files) {
      const delta = deltas.find(({ path }) => path === entry.path), old = parent.get(entry.path) ?? Buffer.alloc(0)
      const bytes = delta ? applyDelta(old, await this.file(delta), tensors) : old
      const cut = chunksOf(entry).map(({ hash }, i) => [hash, bytes.subarray(i * entry.chunk, (i + 1) * entry.chunk)])
      const right = bytes.length === entry.size && cut.every(([hash, part]) => same(sha256(part), hash))
      if (right) cut.forEach(([hash, part]) => this.put(hash, part))
      results.set(entry.path, right ? bytes : await this.file(entry))
    }
    return results
  }
  /** How many chunks a checkpoint has, and which are here (STR-4). */
  held({ manifest: { files, deltas = [] } }) {
    const all = chunks([...files, ...deltas])
    return { total: all.length, have: writeBitmap(all.flatMap(({ hash }, i) => this.get(hash) ? [i] : []), all.length) }
  }
  /** Forgets what none of these checkpoints and their chains needs. */
  keep(checkpoints) {
    const chain = checkpoints.flatMap(({ manifest }) => manifest.chain ?? [])
    const links = chain.flatMap((hash) => this.get(hash) ?? []).map((bytes) => read('checkpoint-manifest', bytes))
    const entries = [...checkpoints.flatMap(({ manifest }) => [manifest, { deltas: manifest.files }]), ...links]
    const needed = [...chunks(entries.flatMap(({ deltas = [] }) => deltas)), ...checkpoints].map(({ hash }) => hash)
    const kept = new Set([...needed, ...chain].map(hex))
    for (const name of this.home.list('blobs')) if (!kept.has(name)) this.home.remove(`blobs/${name}`)
  }
}
