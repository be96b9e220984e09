// Checkpoints that a client holds: blobs by hash in its home, fetched from whoever is connected (chapters 03, 09).
import { setTimeout as sleep } from 'node:timers/promises'
import { applyDelta, checkChain, chunkOf, chunksOf, readSafetensors } from './checkpoints.js'
import { hex, same, sha256 } from './envelopes.js'
import { Refused, must } from './msgpack.js'
import { BLOB, writeBitmap } from './structures.js'

const chunksOfAll = ({ files, deltas = [] }) => [...files, ...deltas].flatMap(chunksOf)

export class Holdings {
  constructor(home, peer) {
    Object.assign(this, { home, peer, liars: new Set() })
  }
  get(hash) { // disks err: what is not what it was is not here
    const bytes = this.home.read(`blobs/${hex(hash)}`)
    return bytes && same(sha256(bytes), hash) ? bytes : undefined
  }
  put(bytes) {
    const hash = sha256(bytes)
    if (!this.get(hash)) this.home.write(`blobs/${hex(hash)}`, bytes)
    return bytes
  }
  /** A blob from here, or from the first peer that has it; who sends another one is dropped (STR-3). */
  async fetch({ hash, length }) {
    for (let busy = true; busy; await sleep(500)) {
      const held = this.get(hash)
      if (held) return held
      busy = false
      for (const id of this.peer.peers.filter((one) => !this.liars.has(String(one)))) {
        try {
          return this.put(chunkOf(await this.peer.ask(id, BLOB, { hash }), hash, length))
        } catch (error) { // one that is slow or gone has done nothing wrong
          busy ||= error.code === 'busy'
          if (error instanceof Refused && !['busy', 'not-found'].includes(error.code)) this.distrust(id)
        }
      }
    }
    throw new Error(`no connected peer has the chunk ${hex(hash).slice(0, 16)}`)
  }
  distrust(id) {
    this.liars.add(String(id))
    this.peer.drop(id)
  }
  async file(entry) {
    const parts = []
    for (const chunk of chunksOf(entry)) parts.push(await this.fetch(chunk))
    return Buffer.concat(parts)
  }
  async filesOf(entries) {
    const files = new Map()
    for (const entry of entries) files.set(entry.path, await this.file(entry))
    return files
  }
  /** The files of a checkpoint, chunks and tensors verified. What deltas make of `held` is not fetched. */
  async load({ manifest }, held) {
    await this.applyDeltas(manifest, held).catch(() => {}) // CKP-15: then all files are fetched
    const files = await this.filesOf(manifest.files)
    const weights = [...files].filter(([path]) => path.endsWith('.safetensors')).map(([, bytes]) => bytes)
    const found = new Map(weights.flatMap((bytes) => [...readSafetensors(bytes)]))
    must(found.size === manifest.tensors.size, 'hash-mismatch')
    for (const [name, { data }] of found) must(same(sha256(data), manifest.tensors.get(name) ?? ''), 'hash-mismatch')
    return files
  }
  async applyDeltas(manifest, held) {
    const begin = manifest.chain?.findIndex((hash) => held && same(hash, held.hash)) ?? -1
    if (begin < 0) return
    const chain = checkChain(manifest, await Promise.all(manifest.chain.map((hash) => this.fetch({ hash }))))
    let files = held.files
    for (const { files: entries, deltas = [], tensors } of [...chain.slice(begin + 1), manifest]) {
      for (const delta of deltas) {
        const { chunk } = entries.find(({ path }) => path === delta.path)
        const bytes = applyDelta(files.get(delta.path), await this.file(delta), tensors)
        for (let at = 0; at < bytes.length; at += chunk) this.put(bytes.subarray(at, at + chunk))
      }
      files = await this.filesOf(entries)
    }
  }
  /** How many chunks a checkpoint has, and which are here (STR-4). */
  bitmap({ manifest }) {
    const all = chunksOfAll(manifest), held = all.flatMap(({ hash }, i) => this.get(hash) ? [i] : [])
    return { total: all.length, have: writeBitmap(held, all.length) }
  }
  /** Forgets what none of these checkpoints needs. */
  keep(checkpoints) {
    const needed = checkpoints.flatMap(({ hash, manifest }) =>
      [hash, ...manifest.chain ?? [], ...chunksOfAll(manifest).map((chunk) => chunk.hash)])
    const kept = new Set(needed.map(hex))
    for (const name of this.home.list('blobs')) if (!kept.has(name)) this.home.remove(`blobs/${name}`)
  }
}
