#!/usr/bin/env node
// A volunteer: joins a run by its invite, follows checkpoints, publishes groups, reads receipts (chapter 05, Joining).
// It plays sort-digits on a llama in float 32. It does not publish by reference, know introductions, HTTP, mirrors or
// mDNS, ask for bitmaps, choose among sources, verify its own groups, or keep proofs of what it contributed.
import { homedir, totalmem } from 'node:os'
import { setImmediate as turn, setTimeout as sleep } from 'node:timers/promises'
import { parseArgs } from 'node:util'
import { MAX_GOSSIP, hex, same, seal } from './envelopes.js'
import { Holdings } from './holdings.js'
import { Home, answered, largest } from './home.js'
import { Refused, must } from './msgpack.js'
import { Peer } from './peer.js'
import { loadPolicy } from './policy.js'
import { pack } from './shapes.js'
import { BLOB, HAVE, HEAD, openCheckpoint, openReceipts, openRun, printable, readBitmap, readInvite, shardOf,
  topics } from './structures.js'
import { ENGINE, makeGroup, settingsOf } from './tasks.js'

const USE = 'Use: node volunteer.js INVITE [--home FOLDER] [--groups N] [--seconds S] [--listen MULTIADDR] [--json]'
const IGNORED = 'expired future-dated duplicate sequence-reused unknown-kind unsupported-version'.split(' ') // GOS-2
const LONGEST_QUARANTINE = 86460000, UPLOADS = 8
const WINDOW = 32 // groups that may wait for receipts (RCP-5)
const unfinished = (sentence, code = 1) => Object.assign(new Error(sentence), { exit: code }) // ends the client

class Volunteer {
  constructor(options, home) {
    Object.assign(this, home.identity(), { options, id: options.run, known: new Map(), seen: new Map() })
    Object.assign(this, { accepted: 0, refused: {}, free: 0, nextHello: 0 })
    this.local = new Home(home.path(`runs/${hex(this.id)}`))
    const fresh = { seq: 0, counters: {}, h: {}, groups: {}, standing: { ts: 0, until: 0 } }
    this.state = { ...fresh, ...JSON.parse(this.local.read('state.json') ?? '{}') }
    if (largest(this.state.h) !== null) this.state.h = { kept: largest(this.state.h) }
    this.ended = new Promise((resolve) => (this.end = (error) => resolve(this.over = error ?? true)))
  }
  get top() { return this.newest?.version ?? -1 } // the newest version that is known
  save() { this.local.write('state.json', JSON.stringify(this.state)) }
  say(event, fields) {
    const told = Object.entries(fields).filter(([, value]) => (value ?? '') !== '').map((field) => field.join(' '))
    console.log(printable(this.options.json ? JSON.stringify({ event, ...fields }) : `${event}: ${told.join(', ')}`))
  }

  async join() {
    const proof = this.local.path('equivocation')
    if (this.local.read('equivocation'))
      throw unfinished(`This run's trainer contradicted itself: ask its owner; remove ${proof} to go on.`)
    this.peer = await Peer.start(this.seed, this.options.listen).catch(({ message }) => {
      throw unfinished(`This client cannot listen there (${message}): choose another --listen.`, 2)
    })
    this.holdings = new Holdings(this.local, this.peer)
    for (const address of this.peer.addresses) this.say('listening', { address })
    this.peer.keep(this.options.addresses)
    await this.enter()
    this.check(this.run)
    this.topics = topics(this.id)
    this.serve()
    this.peer.watch(this.topics.checkpoints, (data) => this.judge(data, openCheckpoint, (it) => this.learn(it, data)))
    this.peer.watch(this.topics.receipts, (data) => this.judge(data, openReceipts, (it) => this.hear(it)))
    this.follow()
    setInterval(() => this.askHeads(), 15000)
    while (!this.over) await this.work()
  }
  async enter() { // with what an earlier start stored, and what peers tell within 30 s
    const [run, head] = ['run', 'head'].map((name) => this.local.read(name))
    if (run) this.meet(run)
    if (run && head) this.learn(openCheckpoint(head, this.id, this.run), head)
    for (const until = Date.now() + 30000; !this.told && !(this.run && Date.now() > until); await sleep(1000)) {
      if (Date.now() > until) throw unfinished(`Nobody answered for this run at ${this.options.addresses.join(', ')} ` +
        'in 30 s. Ask whoever gave you the invite whether the run is up, and look at your network.')
      await this.askHeads()
    }
  }
  async askHeads() {
    for (const peer of this.peer.peers) {
      try {
        const { run, checkpoint } = await this.peer.ask(peer, HEAD, { run: this.id })
        if (run && !this.run) this.meet(run)
        if (!checkpoint || !this.run) continue
        this.learn(openCheckpoint(checkpoint, this.id, this.run), checkpoint)
        this.told = true
      } catch ({ code }) { // another peer may know better
        if (code === 'unsupported-version') this.end(unfinished('This run has another protocol: update this client.'))
      }
    }
  }
  meet(envelope) {
    Object.assign(this, { run: openRun(envelope, this.id).manifest, envelope })
    this.local.write('run', envelope)
  }
  check({ model, environments, chat }) { // before anything is sent or downloaded
    const needed = 8 * Number(model.parameters) + 4e8, names = environments.map(({ id, version }) => `${id} ${version}`)
    const refuse = (why) => { throw unfinished(`${why} Take part in it with another client or machine.`) }
    if (model.family !== 'llama') refuse(`This run's model is of the family ${model.family}; this client can do llama.`)
    if (model.dtype === 'float16') refuse('The numbers of this run\'s model are float16; this client can do others.')
    if (chat) refuse(`This run has conversations in the format ${chat}; this client can do none.`)
    if (needed > totalmem()) refuse(`This run's model needs ${needed} bytes of memory; this machine has ${totalmem()}.`)
    if (!environments.some(settingsOf)) refuse(`This run has ${names.join(', ')}; this client can do sort-digits 1.`)
  }

  /** Takes note of a genuine checkpoint: the newest is followed, two of one version by one key end the client. */
  learn({ head, hash, content, manifest }, envelope) {
    const version = Number(manifest.version), slot = `${version} ${hex(head.from)}`, before = this.known.get(slot)
    if (before && !same(before.hash, hash)) { // CKP-17
      this.local.write('equivocation', pack({ first: before.envelope, second: envelope }))
      return this.end(unfinished(`A trainer signed two checkpoints of version ${version}. Both are in ` +
        `${this.local.path('equivocation')}: show them to the run's owner.`))
    }
    this.known.set(slot, { version, hash, content, manifest, envelope })
    if (version <= this.top) return
    this.newest = this.known.get(slot)
    this.local.write('head', envelope)
    for (const [key, one] of this.known) if (this.isForgotten(one.version)) this.known.delete(key)
    if (this.topics) this.follow()
  }
  isForgotten(version) { return version < this.top - 4 * (this.run.staleness + 1) }
  async follow() {
    if (this.following) return
    this.following = true
    while ((this.ready?.version ?? -1) < this.top && !this.over) {
      try {
        const target = this.newest, files = await this.holdings.load(target, this.ready)
        const policy = loadPolicy(files.get('model.safetensors'), JSON.parse(files.get('config.json')))
        this.holdings.put(target.content) // a later chain may begin with it
        this.ready = { ...target, files, policy }
        this.holdings.keep([...this.known.values()])
        for (const old of Object.keys(this.state.counters).slice(0, -64)) delete this.state.counters[old]
        this.say('checkpoint', { version: target.version, hash: hex(target.hash) })
      } catch ({ message }) {
        this.say('trouble', { version: this.top, why: message, next: 'it is tried again' })
        await sleep(1000)
      }
    }
    this.following = false
  }
  judge(data, open, use) { // the verdict on a message of the checkpoints or the receipts topic (GOS-1)
    const now = Date.now(), numberOf = ({ from, seq }) => `${hex(from)} ${seq}`
    const known = (head, id) => {
      must(!this.seen.has(hex(id)), 'duplicate')
      must(!this.seen.has(numberOf(head)), 'sequence-reused')
    }
    for (const [name, exp] of this.seen) if (exp <= now) this.seen.delete(name)
    try {
      const opened = open(data, this.id, this.run, { now, known, limit: MAX_GOSSIP })
      for (const name of [hex(opened.id), numberOf(opened.head)]) this.seen.set(name, opened.head.exp)
      use(opened)
      return 'accept'
    } catch (error) {
      if (!(error instanceof Refused)) this.end(error)
      return IGNORED.includes(error.code) ? 'ignore' : 'reject'
    }
  }
  serve() {
    const ours = (answer) => (request) => same(request.run, this.id) ? answer(request) : { error: 'wrong-run' }
    this.peer.serve(HEAD, ours(() => ({ run: this.envelope, checkpoint: this.newest?.envelope })))
    this.peer.serve(BLOB, ({ hash }, open) => {
      const data = open > UPLOADS ? undefined : this.holdings.get(hash)
      return data ? { data } : { error: open > UPLOADS ? 'busy' : 'not-found' }
    })
    this.peer.serve(HAVE, ours(({ checkpoint, have: theirs }) => {
      const found = [...this.known.values()].find(({ hash }) => same(hash, checkpoint))
      if (!found) return { error: 'unknown-checkpoint' }
      const { have, total } = this.holdings.bitmap(found)
      if (theirs) readBitmap(theirs, total)
      return { have }
    }))
  }

  hear({ head, manifest: { items, known = [], standings = [] } }) { // what a trainer says of this key
    const mine = ({ peer }) => same(peer, this.key), trainer = hex(head.from), ts = Number(head.ts)
    for (const { version } of known.filter(mine)) this.count(trainer, version)
    for (const item of items.filter(mine)) this.settle(item, trainer, ts)
    for (const { state, until } of standings.filter(mine)) this.stand(state, Number(until) - ts, ts)
    this.save()
  }
  count(trainer, h) { // versions above h count for this key (HEL-2)
    this.state.h = answered(this.state.h, trainer, h, this.top)
    if (h === null) this.nextHello = 0
  }
  settle({ rollout, verdict, code, measured, threshold, credit }, trainer, ts) {
    if (code === 'quarantined') this.stand('quarantine', threshold - measured, ts)
    if (code === 'banned') this.stand(code, 0, ts)
    const [name, group] = Object.entries(this.state.groups).find(([, { ids }]) => ids.includes(hex(rollout))) ?? []
    if (!group) return
    this.local.remove(`groups/${name}`)
    delete this.state.groups[name]
    if (code === 'key-too-new') this.count(trainer, threshold === null ? null : threshold - 1)
    this.say('receipt', { verdict, code, version: group.version, counter: group.counter, measured, threshold, credit })
    if (verdict === 'refused') this.refused[code] = (this.refused[code] ?? 0) + 1
    else if (++this.accepted >= this.options.groups) this.end()
  }
  /** A trainer's word on this key, which ends `ms` later in a quarantine; the latest `ts` holds (RCP-6, RCP-7). */
  stand(state, ms, ts) {
    const before = this.state.standing, why = JSON.stringify(this.refused)
    if (ts < before.ts) return
    const rest = Math.max(0, Math.min(LONGEST_QUARANTINE, { banned: Infinity, quarantine: ms }[state] ?? 0))
    if (state !== before.state) this.say('standing', { state, seconds: Math.ceil(rest / 1000), refused: why })
    this.state.standing = { state, ts, until: Date.now() + rest }
    if (state === 'banned')
      this.end(unfinished(`The trainer banned this key (${why}): test this client by the vectors.`))
  }

  /** Seals and publishes; a number and what `note` adds are on disk before anybody sees the message. False: nobody
   * listens; undefined: it is too large. */
  async send(kind, body, note = () => {}) {
    const now = Date.now(), { state } = this
    state.seq = Math.max(state.seq + 1, now)
    const { id, envelope } = seal({ kind, run: this.id, seq: state.seq, now, body }, this.secret)
    if (envelope.length > Math.min(MAX_GOSSIP, this.run.limits.inline_bytes)) return undefined
    note(hex(id))
    this.save()
    return this.peer.publish(this.topics.rollouts(shardOf(this.key, this.run.shards)), envelope)
  }
  async greet() { // until a trainer has answered and a checkpoint counts for this key (HEL-1)
    const now = Date.now(), h = largest(this.state.h) ?? Infinity
    if (this.top > h || now < this.nextHello) return
    const heard = await this.send('hello', pack({ agent: `${ENGINE.name}/${ENGINE.version}`, engine: ENGINE }))
    this.nextHello = now + (heard ? 8000 : 200)
  }
  giveUp(name) { // a receipt for it still counts
    if (this.state.groups[name]) this.state.groups[name].given = true
    this.local.remove(`groups/${name}`)
  }
  async issue(name) { // each time sealed anew (GOS-12), after 10 s, 20 s, ... (RCP-4)
    const group = this.state.groups[name], body = this.local.read(`groups/${name}`)
    if (!group || !body) return delete this.state.groups[name] // its receipt came just now, or just before a crash
    const throttle = this.state.standing.state === 'throttled' ? 8 : 1, rate = 0.95 * this.run.limits.groups_per_second
    this.free = Math.max(this.free, Date.now() - 1000) + 1000 * throttle / rate // what was lost in 1 s is made up for
    const heard = await this.send('rollout', body, (id) => group.ids.push(id))
    if (heard === undefined) return this.giveUp(name) // too large for gossip: a hole, of which a few are allowed
    group.next = Date.now() + (heard ? group.wait : 1000)
    if (heard) group.wait *= 2
    else group.ids.pop() // no receipt will name it
  }
  async work() { // one step: a hello, what is to be repeated, a new group
    const { state, top, run, ready } = this
    await turn()
    await this.greet()
    if (Date.now() < state.standing.until) return sleep(100)
    for (const [name, { version, next, given }] of Object.entries(state.groups)) {
      if (this.isForgotten(version)) delete state.groups[name]
      else if (version < top - run.staleness && !given) this.giveUp(name)
      else if (!given && Date.now() >= Math.max(next, this.free)) await this.issue(name)
    }
    const waiting = Object.values(state.groups).filter(({ given }) => !given).length
    const counts = ready?.version > (largest(state.h) ?? Infinity) && ready.version >= top - run.staleness
    if (!counts || waiting >= WINDOW || Date.now() < this.free) return sleep(50)
    const hash = hex(ready.hash), counter = state.counters[hash] ?? 0, name = `${hash.slice(0, 16)}-${counter}`
    const group = await makeGroup(this, ready, counter).catch((error) => {
      if (!(error instanceof Refused)) throw error // from such logits nothing is drawn (SMP-3): a hole
    })
    if (group) {
      this.local.write(`groups/${name}`, pack(group))
      state.groups[name] = { version: ready.version, counter, ids: [], next: 0, wait: 10000 }
    }
    state.counters[hash] = counter + 1 // a crash before this makes the same group once more
    this.save()
    return group ? this.issue(name) : sleep(50)
  }
}

function readFlags() {
  const text = { type: 'string' }, listen = { ...text, multiple: true }, json = { type: 'boolean' }
  const options = { home: text, groups: text, seconds: text, listen, json }
  try {
    const { values, positionals: [invite, ...more] } = parseArgs({ allowPositionals: true, options })
    const [groups, seconds] = ['groups', 'seconds'].map((name) => Number(values[name] ?? Infinity))
    if (!invite || more.length || !(groups > 0 && seconds > 0)) throw new Error('One invite, and numbers above 0.')
    return { home: `${homedir()}/.nous-volunteer-js`, ...values, groups, seconds, ...readInvite(invite) }
  } catch ({ code, message }) {
    throw unfinished(code === 'invite' ? 'This is no valid invite: copy all of it again.' : `${message} ${USE}`, 2)
  }
}
async function main() {
  const options = readFlags(), home = new Home(options.home), owner = home.lock()
  if (owner) throw unfinished(`Process ${owner} works with ${options.home}: end it, choose another --home, or remove ` +
    `${home.path('lock')} if it is no client.`)
  const volunteer = new Volunteer(options, home)
  for (const signal of ['SIGINT', 'SIGTERM']) process.once(signal, () => volunteer.end())
  if (options.seconds < Infinity) setTimeout(volunteer.end, 1000 * options.seconds, undefined)
  const ending = await Promise.race([volunteer.ended, volunteer.join()])
  await sleep(500) // what was published is on its way
  volunteer.say('end', { accepted: volunteer.accepted, refused: JSON.stringify(volunteer.refused) })
  await volunteer.peer?.host.stop()
  if (ending instanceof Error) throw ending
}
main().then(() => process.exit(0), ({ message, exit }) => {
  console.error(printable(exit ? message : `The client stopped (${message}); start it again, nothing is lost.`))
  process.exit(exit ?? 1)
})
