// What outlives a restart: the client's key, and what it knows of a run.
import { createPrivateKey, generateKeyPairSync } from 'node:crypto'
import { existsSync, mkdirSync, readFileSync, readdirSync, renameSync, rmSync, writeFileSync } from 'node:fs'
import { dirname, join } from 'node:path'

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
  identity() { // the one key of libp2p and envelopes, made where there is none
    const make = () => generateKeyPairSync('ed25519').privateKey.export({ type: 'pkcs8', format: 'pem' })
    if (!this.read('key.pem')) this.write('key.pem', make())
    const secret = createPrivateKey(this.read('key.pem')), { d, x } = secret.export({ format: 'jwk' })
    return { secret, seed: Buffer.from(d, 'base64url'), key: Buffer.from(x, 'base64url') }
  }
}
