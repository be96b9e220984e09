// What outlives a restart: the client's key, and what it knows of a run.
import { createPrivateKey, generateKeyPairSync } from 'node:crypto'
import { existsSync, mkdirSync, readFileSync, readdirSync, renameSync, rmSync, writeFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { keyOf } from './envelopes.js'

const AHEAD = 16 // versions that an answer may be newer than the newest known one: it crosses them on its way
/** HEL-2: `answers` are versions by trainer, and one that was `kept` from an earlier start, behind a trainer's word `h`
 * (null: it does not know this key). The largest is what counts; a word that cannot be changes nothing. */
export function answered({ kept, ...answers }, trainer, h, newest) {
  if (h === null) return {}
  if (!Number.isInteger(h) || h < -1 || h > newest + AHEAD) return { ...answers, ...(kept !== undefined && { kept }) }
  return { ...answers, [trainer]: h, ...(kept <= newest && { kept }) }
}
export const largest = (answers) => Object.values(answers).reduce((a, b) => a === null ? b : Math.max(a, b), null)

function runs(pid) {
  try {
    return process.kill(pid, 0)
  } catch ({ code }) {
    return code === 'EPERM' // it is somebody else's
  }
}

export class Home {
  constructor(folder) { this.path = (name) => join(folder, name) }
  read(name) { return existsSync(this.path(name)) ? readFileSync(this.path(name)) : undefined }
  list(name) { return existsSync(this.path(name)) ? readdirSync(this.path(name)) : [] }
  remove(name) { rmSync(this.path(name), { force: true }) }
  write(name, bytes) { // in one step, so that neither a crash nor a power failure leaves half a file
    mkdirSync(dirname(this.path(name)), { recursive: true, mode: 0o700 })
    writeFileSync(this.path(`${name}.part`), bytes, { mode: 0o600, flush: true })
    renameSync(this.path(`${name}.part`), this.path(name))
  }
  /** Two clients of one key would use a `seq` twice (ENV-9). The number of the process that holds this home, if that
   * is another one that runs: a lock that was left by a crash holds nobody off. */
  lock() {
    mkdirSync(this.path('.'), { recursive: true, mode: 0o700 })
    try {
      writeFileSync(this.path('lock'), String(process.pid), { flag: 'wx' })
    } catch {
      const owner = Number(this.read('lock'))
      if (owner !== process.pid && runs(owner)) return owner
      this.write('lock', String(process.pid))
    }
    process.once('exit', () => this.remove('lock'))
  }
  identity() { // the one key of libp2p and envelopes, made where there is none
    const make = () => generateKeyPairSync('ed25519').privateKey.export({ type: 'pkcs8', format: 'pem' })
    if (!this.read('key.pem')) this.write('key.pem', make())
    const secret = createPrivateKey(this.read('key.pem')), { d } = secret.export({ format: 'jwk' })
    return { secret, seed: Buffer.from(d, 'base64url'), key: keyOf(secret) }
  }
}
