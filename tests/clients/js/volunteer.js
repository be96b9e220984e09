#!/usr/bin/env node
// A volunteer: joins a run by its invite, follows its checkpoints, publishes groups, reads its receipts (chapter 05, Joining).
import { totalmem, homedir } from 'node:os'
import { join } from 'node:path'
import { setImmediate as turn, setTimeout as sleep } from 'node:timers/promises'
import { parseArgs } from 'node:util'
import { Holdings } from './holdings.js'
import { Home } from './home.js'
import { Refused, must } from './msgpack.js'
import { Peer } from './peer.js'
import { assign, choose, loadPolicy, sortDigits, taskSeed, textOf, tokensOf, uniforms } from './policy.js'
import { MAX_ENVELOPE, hex, openCheckpoint, openEnvelope, openReceipts, openRun, planes, read, readBitmap, readInvite, same, seal,
  shardOf, topics, write } from './structures.js'

const AGENT = 'nous-volunteer-js/0.1.0', ENGINE = { name: 'nous-volunteer-js', version: '0.1.0', dtype: 'float32', device: 'cpu' }
const SOFT = ['expired', 'future-dated', 'duplicate', 'sequence-reused', 'rate', 'quarantined', 'banned', 'unknown-checkpoint',
  'stale', 'busy', 'unknown-kind', 'unsupported-version'] // gossip that is ignored; all other codes reject (GOS-2)
const AHEAD = 16, LONGEST_QUARANTINE = 86_460_000, UPLOADS = 8, FIRST_WINDOW = 32

/** What ends the client: a sentence with a next step, and an exit code. */
class Ending extends Error {
  constructor(sentence, code) {
    super(sentence)
    this.code = code
  }
}
const printable = (text) => text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (found) => [...found].map((one) =>
  `\\u${one.codePointAt(0).toString(16).padStart(4, '0')}`).join(''))

class Volunteer {
  constructor(options, invite, home) {
    Object.assign(this, { options, invite, runId: invite.run, home, known: new Map(), seen: new Map(), accepted: 0, refused: {},
      hello: { next: 0, wait: 2 }, quietUntil: 0, level: 1, filled: Date.now(), window: FIRST_WINDOW })
    this.ended = new Promise((resolve) => (this.end = (sentence, code) => resolve({ sentence, code })))
    this.local = new Home(home.path(join('runs', hex(invite.run))))
  }
  get top() { // the newest version that is known
    return this.newest?.version ?? -1
  }
  say(event, fields) {
    const text = Object.entries(fields).filter(([, value]) => value !== null && value !== '').map(([key, value]) => `${key} ${value}`)
    console.log(printable(this.options.json ? JSON.stringify({ event, ...fields }) : `${event}: ${text.join(', ')}`))
  }

  // --- joining ---------------------------------------------------------------------------------------

  async join() {
    must(!this.local.read('equivocation'), 'equivocation')
    Object.assign(this, this.home.identity())
    this.peer = await Peer.start(this.seed, this.options.listen)
    this.holdings = new Holdings(this.local, this.peer)
    for (const address of this.peer.addresses) this.say('listening', { address })
    this.peer.keep(this.invite.addresses)
    for (const until = Date.now() + 30_000; !this.newest && !(this.run && Date.now() > until); await sleep(1000)) {
      if (Date.now() > until) throw new Ending(`Nobody answered for this run at ${this.invite.addresses.join(', ')} within 30 s. ` +
        'Ask whoever gave you the invite whether the run is up, and check your network.', 1)
      await this.askHeads()
    }
    this.check()
    const old = JSON.parse(this.local.read('state.json') ?? '{}')
    this.state = { seq: 0, counters: {}, h: {}, groups: {}, ...old }
    for (const [trainer, h] of Object.entries(this.state.h)) if (h > this.top) delete this.state.h[trainer]
    this.topics = topics(this.runId)
    this.serve()
    this.peer.watch(this.topics.checkpoints, (data) => this.judge(data, 'checkpoint'))
    this.peer.watch(this.topics.receipts, (data) => this.judge(data, 'receipts'))
  }
  async askHeads() {
    for (const id of this.peer.peers) {
      try {
        const reply = read('head-reply', await this.peer.ask(id, '/nous/head/1', write('head-request', { run: this.runId }), 32001024, 20))
        if (reply.run && !this.run) {
          this.run = openRun(reply.run, this.runId).manifest
          this.local.write('run', this.runEnvelope = reply.run)
        }
        if (!reply.checkpoint || !this.run) continue
        this.learn({ ...openCheckpoint(reply.checkpoint, this.runId, this.run), envelope: reply.checkpoint })
      } catch (error) { // another peer may know better
        if (error.code === 'unsupported-version') throw new Ending('This run speaks another version of the protocol: update this client.', 1)
      }
    }
  }
  /** A run that this client cannot do is refused before anything is downloaded. */
  check() {
    const { model, environments } = this.run, megabytes = (bytes) => `${Math.ceil(bytes / 1e6)} MB`
    const needed = 8 * Number(model.parameters) + 400e6
    const refuse = (wrong, sentence) => {
      if (wrong) throw new Ending(`${sentence} Use another client for this run.`, 1)
    }
    refuse(model.family !== 'llama', `The run's model is of the family ${model.family}; this client can only do llama.`)
    refuse(needed > totalmem(), `The run's model needs ${megabytes(needed)} of memory; this machine has ${megabytes(totalmem())}.`)
    refuse(!environments.some(playable), `Of the run's environments (${environments.map(({ id, version }) => `${id} ${version}`)
      .join(', ')}) this client can do none: it has sort-digits 1.`)
  }

  // --- checkpoints -----------------------------------------------------------------------------------

  /** A checkpoint of somebody: what contradicts another one ends the client, and the newest is followed. */
  learn(opened) {
    const checkpoint = { ...opened, version: Number(opened.manifest.version) }
    const newest = this.top, from = hex(checkpoint.head.from), slot = `${checkpoint.version} ${from}`
    const before = this.known.get(slot)
    if (before && !same(before.hash, checkpoint.hash)) this.contradict(before, checkpoint)
    this.known.set(slot, checkpoint)
    if (checkpoint.version <= newest) return
    this.newest = checkpoint
    this.local.write('head', checkpoint.envelope)
    for (const [key, { version }] of this.known) if (version <= checkpoint.version - 4 * (this.run.staleness + 1)) this.known.delete(key)
    if (this.state) this.follow()
  }
  contradict(first, second) {
    this.local.write('equivocation', write('equivocation', { first: first.envelope, second: second.envelope }))
    this.end(`A trainer signed two different checkpoints of version ${second.version}. Both are kept in ` +
      `${this.local.path('equivocation')}. Ask the run's owner; remove the file to go on.`, 1)
  }
  async follow() {
    if (this.following) return
    this.following = true
    while ((this.ready?.version ?? -1) < this.top) {
      const target = this.newest
      try {
        const { files, deltas } = await this.holdings.files(target, this.ready)
        const policy = loadPolicy(files.get('model.safetensors'), JSON.parse(files.get('config.json')))
        this.holdings.put(target.hash, target.content)
        this.ready = { ...target, files, policy }
        this.holdings.keep([...new Set([this.newest, this.ready])])
        this.say('checkpoint', { version: target.version, checkpoint: hex(target.hash), by: deltas ? 'deltas' : 'files' })
      } catch (error) {
        this.say('trouble', { version: target.version, message: `${error.message}; it is tried again` })
        await sleep(1000)
      }
    }
    this.following = false
  }

  // --- gossip and what others ask ----------------------------------------------------------------------

  judge(data, kind) {
    const seen = (head, id) => [hex(id), `${hex(head.from)} ${head.seq}`]
    const known = (head, id) => {
      const [same, sequence] = seen(head, id)
      must(!this.seen.has(same), 'duplicate')
      must(!this.seen.has(sequence), 'sequence-reused')
    }
    try {
      for (const [key, exp] of this.seen) if (exp <= Date.now()) this.seen.delete(key)
      const options = { now: Date.now(), known, limit: MAX_ENVELOPE }
      const opened = (kind === 'checkpoint' ? openCheckpoint : openReceipts)(data, this.runId, this.run, options)
      for (const name of seen(opened.head, opened.id)) this.seen.set(name, opened.head.exp)
      kind === 'checkpoint' ? this.learn({ ...opened, envelope: data }) : this.hear(opened)
      return 'accept'
    } catch (error) {
      if (!(error instanceof Refused)) throw error
      return SOFT.includes(error.code) ? 'ignore' : 'reject'
    }
  }
  serve() {
    const wrong = (run) => !same(run, this.runId) && { error: 'wrong-run' }
    this.peer.serve('/nous/head/1', 1024, 8, (bytes) => write('head-reply', wrong(read('head-request', bytes).run) ||
      { run: this.runEnvelope, checkpoint: this.newest?.envelope }))
    this.peer.serve('/nous/blob/1', 1024, 16, (bytes, id, open) => {
      const data = this.holdings.get(read('blob-request', bytes).hash)
      return write('blob-reply', open > UPLOADS ? { error: 'busy' } : data ? { data } : { error: 'not-found' })
    })
    this.peer.serve('/nous/have/1', 69632, 2, (bytes) => {
      const { run, checkpoint } = read('have-request', bytes)
      const found = [this.ready, this.newest].find((one) => one && same(one.hash, checkpoint))
      return write('have-reply', wrong(run) || (found ? { have: this.holdings.bitmap(found.manifest) } : { error: 'unknown-checkpoint' }))
    })
  }

  // --- receipts ----------------------------------------------------------------------------------------

  hear({ head, items, known = [], standings = [] }) {
    const mine = ({ peer }) => same(peer, this.key), trainer = hex(head.from), ts = Number(head.ts)
    for (const { version } of known.filter(mine)) this.count(trainer, version)
    for (const item of items.filter(mine)) this.settle(item, trainer, ts)
    for (const standing of standings.filter(mine)) this.stand(standing, ts)
    this.save()
  }
  count(trainer, version) { // HEL-2
    if (Number.isInteger(version) && version >= -1 && version <= this.top + AHEAD) this.state.h[trainer] = version
  }
  settle({ rollout, verdict, code, measured, threshold, credit }, trainer, ts) {
    if (code === 'quarantined') this.pause(threshold - measured, ts, code)
    if (code === 'banned') this.pause(Infinity, ts, code)
    const [name, group] = Object.entries(this.state.groups).find(([, one]) => one.ids.includes(hex(rollout))) ?? []
    if (!group || group.settled) return
    if (code === 'key-too-new' && threshold === null) Object.assign(this, { hello: { next: 0, wait: 2 } }, { state: { ...this.state, h: {} } })
    else if (code === 'key-too-new') this.count(trainer, threshold - 1)
    const lag = this.top - group.version
    const step = code === 'stale' ? -1 : lag > this.run.staleness / 2 ? -0.2 : 0.1
    this.window = Math.min(4096, Math.max(4, this.window + step))
    this.local.remove(`groups/${name}`)
    delete this.state.groups[name]
    this.say('receipt', { verdict, code, version: group.version, counter: group.counter, measured, threshold, credit })
    if (verdict === 'accepted') this.accepted++
    else this.refused[code] = (this.refused[code] ?? 0) + 1
    if (this.accepted >= this.options.groups) this.end('', 0)
  }
  stand({ state, accepted, refused, credit, until }, ts) {
    const before = this.state.standing
    if (before && before.ts > ts) return
    this.state.standing = { state, ts }
    if (before?.state !== state) this.say('standing', { state, accepted, refused, credit })
    this.pause(state === 'quarantine' ? Number(until) - ts : state === 'banned' ? Infinity : 0, ts, state)
  }
  pause(ms, ts, why) {
    if (ts < (this.paused ?? 0)) return
    this.paused = ts
    if (ms === Infinity) return this.end(`This key is banned from the run, for ${this.reasons()}. Check this client's arithmetic.`, 1)
    this.quietUntil = Date.now() + Math.min(LONGEST_QUARANTINE, Math.max(0, ms))
    if (ms > 0) this.say('quarantine', { seconds: Math.ceil(ms / 1000), why: this.reasons() || why })
  }
  reasons() {
    return Object.entries(this.refused).map(([code, count]) => `${count} x ${code}`).join(', ')
  }

  // --- work ----------------------------------------------------------------------------------------------

  save() {
    this.local.write('state.json', JSON.stringify(this.state))
  }
  async send(kind, body) {
    this.state.seq = Math.max(this.state.seq + 1, Date.now())
    const envelope = seal({ kind, run: this.runId, seq: this.state.seq, now: Date.now(), body }, this.privateKey)
    return { id: hex(openEnvelope(envelope, {}).id), envelope }
  }
  publish(envelope) {
    return this.peer.publish(this.topics.rollouts(shardOf(this.key, this.run.shards)), envelope)
  }
  /** Says hello until a trainer has answered and a checkpoint counts for this key (HEL-1). */
  async greet() {
    const answers = Object.values(this.state.h), now = Date.now()
    this.h = answers.length ? Math.max(...answers) : Infinity
    if (this.top > this.h || now < this.hello.next) return
    const { envelope } = await this.send('hello', write('hello', { agent: AGENT, engine: ENGINE }))
    this.save()
    const heard = await this.publish(envelope)
    this.hello = heard ? { next: now + 1000 * this.hello.wait, wait: 10 } : { next: now + 200, wait: 2 }
  }
  /** Room for one more message at the run's rate (GOS-6), with what is kept back for clocks. */
  room() {
    const slower = this.state.standing?.state === 'throttled' ? 8 : 1, rate = 0.95 * this.run.limits.groups_per_second / slower
    const most = Math.max(1, Math.min(60 * rate, 4096)), now = Date.now()
    this.level = Math.min(most, this.level + rate * Math.max(0, now - this.filled) / 1000)
    this.filled = now
    return this.level >= 1
  }
  async resend() {
    for (const [name, group] of Object.entries(this.state.groups)) {
      if (group.version < this.top - this.run.staleness && !group.given) {
        group.given = true // a receipt for it counts still
        this.local.remove(`groups/${name}`)
      }
      if (group.version < this.top - 4 * (this.run.staleness + 1)) delete this.state.groups[name]
      if (!group.given && Date.now() >= group.next && this.room()) await this.issue(name, group)
    }
  }
  /** Publishes a group, sealed anew each time (GOS-12). */
  async issue(name, group) {
    const { id, envelope } = await this.send('rollout', this.local.read(`groups/${name}`))
    if (envelope.length > this.run.limits.inline_bytes) return delete this.state.groups[name]
    group.ids.push(id)
    this.save()
    this.level--
    const heard = await this.publish(envelope)
    if (heard) Object.assign(group, { next: Date.now() + 1000 * group.wait, wait: 2 * group.wait })
    else group.next = Date.now() + 1000
  }
  async work() {
    for (;;) {
      await turn()
      await this.greet()
      if (Date.now() < this.quietUntil) {
        await sleep(100)
        continue
      }
      await this.resend()
      const waiting = Object.values(this.state.groups).filter(({ given }) => !given).length
      const fresh = this.ready && this.ready.version > this.h && this.ready.version >= this.top - this.run.staleness
      if (fresh && waiting < this.window && this.room()) await this.begin()
      else await sleep(50)
    }
  }
  async begin() {
    const ready = this.ready, hash = hex(ready.hash), counter = this.state.counters[hash] ?? 0
    const group = await makeGroup(this, ready, counter)
    const name = `${hash.slice(0, 16)}-${counter}`
    this.state.counters[hash] = counter + 1
    if (group) {
      this.local.write(`groups/${name}`, write('rollout-group', group))
      this.state.groups[name] = { version: ready.version, counter, ids: [], next: 0, wait: 10 }
    }
    this.save() // before it is published: its task is never made into another group
    if (group) await this.issue(name, this.state.groups[name])
  }
}

function playable({ id, version, config }) {
  const length = config?.get('length') ?? 4
  return id === 'sort-digits' && version === '1' && Number.isInteger(length) && length >= 1 && length <= 64 &&
    [...(config?.keys() ?? [])].every((key) => key === 'length')
}

/** The group of a task (chapters 06, 07); none where its environment is not this client's. */
async function makeGroup({ run, runId, key }, { hash, manifest, policy }, counter) {
  const { environments, group, sampling, model } = run
  const drawn = assign(taskSeed(runId, hash, manifest.beacon, key, counter), environments.map(({ weight }) => weight), group)
  const place = environments[drawn.environment]
  if (!playable(place)) return undefined
  const { prompt, solution } = sortDigits.task(drawn.taskSeed, place.config?.get('length') ?? 4, manifest.levels?.get(place.id) ?? 0)
  const asked = tokensOf(prompt), most = Math.min(sampling.max_tokens, model.context - asked.length)
  const start = policy.start(), first = start.feed(asked).slice(), trajectories = []
  for (const samplerKey of drawn.samplerKeys) {
    const state = start.copy(), us = uniforms(samplerKey, 0, most), tokens = [], logprobs = []
    for (let logits = first, ended = false; !ended && tokens.length < most; ) {
      const { token, logprob } = choose(logits, sampling.temperature, us[tokens.length])
      tokens.push(token)
      logprobs.push(logprob)
      ended = sampling.stop.includes(token)
      if (!ended && tokens.length < most) logits = state.feed([token])
      await turn() // a long group holds up no connection
    }
    const ended = sampling.stop.includes(tokens.at(-1)), answer = textOf(ended ? tokens.slice(0, -1) : tokens)
    const reward = sortDigits.score(solution, answer, ended)
    trajectories.push({ tokens: planes([...asked, ...tokens], 'u32'), logprobs: planes(logprobs, sampling.logprobs), reward,
      segments: [{ length: asked.length, role: 4, trained: false }, { length: tokens.length, role: 2, trained: true }],
      finish: ended ? 'stop' : 'length', components: new Map([['correct', Number(reward === 1)]]) })
  }
  return { checkpoint: hash, counter, env: place.id, engine: ENGINE, trajectories }
}

function readOptions() {
  const whole = { type: 'string' }
  const { values, positionals } = parseArgs({ allowPositionals: true, options: { home: whole, groups: whole, seconds: whole,
    listen: { type: 'string', multiple: true }, json: { type: 'boolean' } } })
  return { values, positionals }
}

async function main() {
  let options
  try {
    const { values, positionals: [invite, ...more] } = readOptions()
    const count = (name) => {
      if (values[name] !== undefined && !(Number(values[name]) > 0)) throw new Error(`--${name} takes a number above 0.`)
      return values[name] === undefined ? Infinity : Number(values[name])
    }
    if (!invite || more.length) throw new Error('One invite is needed.')
    options = { ...values, invite, groups: count('groups'), seconds: count('seconds') }
  } catch (error) {
    throw new Ending(`${error.message} Use: node volunteer.js INVITE [--home FOLDER] [--groups N] [--seconds S] ` +
      '[--listen MULTIADDR] [--json]', 2)
  }
  let invite
  try {
    invite = readInvite(options.invite)
  } catch {
    throw new Ending('This is no valid invite: copy the whole string again.', 2)
  }
  const home = new Home(options.home ?? join(homedir(), '.nous-volunteer-js'))
  const volunteer = new Volunteer(options, invite, home)
  for (const signal of ['SIGINT', 'SIGTERM']) process.once(signal, () => volunteer.end('', 0))
  if (options.seconds < Infinity) setTimeout(() => volunteer.end('', 0), 1000 * options.seconds)
  const running = volunteer.join().then(() => {
    volunteer.follow()
    setInterval(() => volunteer.askHeads(), 15_000)
    return volunteer.work()
  })
  const { sentence, code } = await Promise.race([volunteer.ended, running])
  volunteer.say('end', { accepted: volunteer.accepted, refused: volunteer.reasons() })
  if (sentence) throw new Ending(sentence, code)
  await volunteer.peer?.stop()
}

main().then(() => process.exit(0), (error) => {
  if (process.env.DEBUG_STACK) console.error(error.stack)
  console.error(printable(error instanceof Ending ? error.message : `Unexpected: ${error.message}`))
  process.exit(error instanceof Ending ? error.code : 1)
})
