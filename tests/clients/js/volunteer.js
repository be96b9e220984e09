#!/usr/bin/env node
// A volunteer: joins a run by its invite, follows checkpoints, publishes groups, reads receipts (chapter 05, Joining).
import { homedir, totalmem } from 'node:os'
import { setImmediate as turn, setTimeout as sleep } from 'node:timers/promises'
import { parseArgs } from 'node:util'
import { Holdings } from './holdings.js'
import { Home, answered, largest } from './home.js'
import { Refused, must } from './msgpack.js'
import { Peer } from './peer.js'
import { assign, choose, loadPolicy, sortDigits, taskSeed, textOf, tokensOf, uniforms } from './policy.js'
import * as structures from './structures.js'

const { hex, openCheckpoint, openReceipts, planes, printable, read, same, write } = structures
const ENGINE = { name: 'nous-volunteer-js', version: '0.1.0', dtype: 'float32', device: 'cpu' }
const USE = 'Use: node volunteer.js INVITE [--home FOLDER] [--groups N] [--seconds S] [--listen MULTIADDR] [--json]'
const IGNORED = 'expired future-dated duplicate sequence-reused unknown-kind unsupported-version'.split(' ') // GOS-2
const LONGEST_QUARANTINE = 86460000, UPLOADS = 8
const unfinished = (sentence, code = 1) => Object.assign(new Error(sentence), { exit: code }) // ends the client

class Volunteer {
  constructor(options, id, home) {
    const counts = { accepted: 0, refused: {}, window: 32, level: 1, filled: Date.now(), hello: { next: 0, wait: 2 } }
    Object.assign(this, home.identity(), counts, { options, id, known: new Map(), seen: new Map(), held: [] })
    this.local = new Home(home.path(`runs/${hex(id)}`))
    this.ended = new Promise((resolve) => (this.end = (error) => resolve(this.over = error ?? true)))
  }
  get top() { return this.newest?.version ?? -1 } // the newest version that is known
  say(event, fields) {
    const told = Object.entries(fields).filter(([, value]) => (value ?? '') !== '').map((field) => field.join(' '))
    console.log(printable(this.options.json ? JSON.stringify({ event, ...fields }) : `${event}: ${told.join(', ')}`))
  }
  async join(addresses) {
    const proof = this.local.path('equivocation'), found = this.local.read('equivocation')
    if (found) throw unfinished(`This run's trainer contradicted itself: ask its owner; remove ${proof} to go on.`)
    this.peer = await Peer.start(this.seed, this.options.listen).catch(({ message }) => {
      throw unfinished(`This client cannot listen there (${message}): choose another --listen.`, 2)
    })
    this.holdings = new Holdings(this.local, this.peer)
    for (const address of this.peer.addresses) this.say('listening', { address })
    this.peer.keep(addresses)
    const [run, head] = ['run', 'head'].map((name) => this.local.read(name)) // of an earlier start
    if (run) this.meet(run)
    if (head && this.run) this.learn(openCheckpoint(head, this.id, this.run), head)
    for (const until = Date.now() + 30000; !this.told && !(this.run && Date.now() > until); await sleep(1000)) {
      if (Date.now() > until) throw unfinished(`Nobody answered for this run at ${addresses.join(', ')} in 30 s. Ask ` +
        'whoever gave you the invite whether the run is up, and look at your network.')
      await this.askHeads()
    }
    this.check(this.run)
    const stored = JSON.parse(this.local.read('state.json') ?? '{}')
    this.state = { seq: 0, counters: {}, h: {}, groups: {}, quiet: 0, ...stored }
    if (largest(this.state.h) !== null) this.state.h = { kept: largest(this.state.h) }
    this.topics = structures.topics(this.id)
    this.serve()
    this.peer.watch(this.topics.checkpoints, (data) => this.judge(data, openCheckpoint, (it) => this.learn(it, data)))
    this.peer.watch(this.topics.receipts, (data) => this.judge(data, openReceipts, (it) => this.hear(it)))
    this.follow()
    setInterval(() => this.askHeads(), 15000)
    while (!this.over) await this.work()
  }
  async askHeads() {
    for (const peer of this.peer.peers) try {
      const raw = await this.peer.ask(peer, '/nous/head/1', write('head-request', { run: this.id }), 32001024, 20)
      const { run, checkpoint } = read('head-reply', raw)
      if (run && !this.run) this.meet(run)
      if (!checkpoint || !this.run) continue
      this.learn(openCheckpoint(checkpoint, this.id, this.run), checkpoint)
      this.told = true
    } catch ({ code }) { // another peer may know better
      if (code === 'unsupported-version') this.end(unfinished('This run speaks another protocol: update this client.'))
    }
  }
  meet(envelope) {
    Object.assign(this, { run: structures.openRun(envelope, this.id).manifest, envelope })
    this.local.write('run', envelope)
  }
  check({ model, environments, chat }) { // before anything is sent or downloaded
    const needed = 8 * Number(model.parameters) + 4e8, names = environments.map(({ id, version }) => `${id} ${version}`)
    const refuse = (why) => { throw unfinished(`${why} Take part in it with another client or machine.`) }
    if (model.family !== 'llama') refuse(`This run's model is of the family ${model.family}; this client can do llama.`)
    if (model.dtype === 'float16') refuse('The numbers of this run\'s model are float16; this client can do others.')
    if (chat) refuse(`This run has conversations in the format ${chat}; this client can do none.`)
    if (needed > totalmem()) refuse(`This run's model needs ${needed} bytes of memory; this machine has ${totalmem()}.`)
    if (!environments.some(playable)) refuse(`This run has ${names.join(', ')}; this client can do sort-digits 1.`)
  }
  /** Takes note of a genuine checkpoint: the newest is followed, two of one version by one key end the client. */
  learn({ head, hash, content, manifest }, envelope) {
    const version = Number(manifest.version), slot = `${version} ${hex(head.from)}`, before = this.known.get(slot)
    if (before && !same(before.hash, hash)) {
      this.local.write('equivocation', write('equivocation', { first: before.envelope, second: envelope }))
      return this.end(unfinished(`A trainer signed two checkpoints of version ${version}. Both are in ` +
        `${this.local.path('equivocation')}: show them to the run's owner.`))
    }
    this.known.set(slot, { version, hash, content, manifest, envelope })
    if (version <= this.top) return
    this.newest = this.known.get(slot)
    this.local.write('head', envelope)
    const forgotten = version - 4 * (this.run.staleness + 1)
    for (const [key, one] of this.known) if (one.version <= forgotten) this.known.delete(key)
    if (this.state) this.follow()
  }
  async follow() {
    if (this.following) return
    for (this.following = true; (this.ready?.version ?? -1) < this.top && !this.over;) try {
      const target = this.newest, { files, deltas } = await this.holdings.files(target, this.ready)
      const policy = loadPolicy(files.get('model.safetensors'), JSON.parse(files.get('config.json')))
      this.holdings.put(target.hash, target.content) // a later chain may begin with it
      this.ready = { ...target, files, policy }
      this.held = [target, ...this.held.slice(0, 3)]
      this.holdings.keep([...new Set([this.newest, ...this.held])])
      for (const old of Object.keys(this.state.counters).slice(0, -64)) delete this.state.counters[old]
      this.say('checkpoint', { version: target.version, hash: hex(target.hash), by: deltas ? 'deltas' : 'files' })
    } catch ({ message }) {
      this.say('trouble', { version: this.top, why: message, next: 'it is tried again' })
      await sleep(1000)
    }
    this.following = false
  }
  judge(data, open, use) { // the verdict on a message of the checkpoints or the receipts topic (GOS-1)
    const now = Date.now(), names = ({ from, seq }, id) => [hex(id), `${hex(from)} ${seq}`]
    const known = (...message) => names(...message).forEach((name, i) =>
      must(!this.seen.has(name), ['duplicate', 'sequence-reused'][i]))
    for (const [name, exp] of this.seen) if (exp <= now) this.seen.delete(name)
    try {
      const opened = open(data, this.id, this.run, { now, known, limit: structures.MAX_ENVELOPE })
      for (const name of names(opened.head, opened.id)) this.seen.set(name, opened.head.exp)
      use(opened)
      return 'accept'
    } catch (error) {
      if (!(error instanceof Refused)) this.end(error)
      return IGNORED.includes(error.code) ? 'ignore' : 'reject'
    }
  }
  serve() {
    const answer = (name, limit, most, reply) => this.peer.serve(`/nous/${name}/1`, limit, most, (bytes, open) => {
      const request = read(`${name}-request`, bytes), wrong = request.run && !same(request.run, this.id)
      return write(`${name}-reply`, wrong ? { error: 'wrong-run' } : reply(request, open))
    })
    answer('head', 1024, 8, () => ({ run: this.envelope, checkpoint: this.newest?.envelope }))
    answer('blob', 1024, 16, ({ hash }, open) => {
      const data = open > UPLOADS ? undefined : this.holdings.get(hash)
      return data ? { data } : { error: open > UPLOADS ? 'busy' : 'not-found' }
    })
    answer('have', 69632, 2, ({ checkpoint, have }) => {
      const found = [this.newest, ...this.held].find((one) => one && same(one.hash, checkpoint))
      if (!found) return { error: 'unknown-checkpoint' }
      const bits = this.holdings.held(found)
      if (have) structures.readBitmap(have, bits.total)
      return { have: bits.have }
    })
  }
  hear({ head, items, known = [], standings = [] }) { // what a trainer says of this key
    const mine = ({ peer }) => same(peer, this.key), trainer = hex(head.from), ts = Number(head.ts)
    for (const { version } of known.filter(mine)) this.count(trainer, version)
    for (const item of items.filter(mine)) this.settle(item, trainer, ts)
    for (const standing of standings.filter(mine)) this.stand(standing, ts)
    this.save()
  }
  count(trainer, h) { // versions above h count for this key (HEL-2); an answer that cannot be changes nothing
    this.state.h = answered(this.state.h, trainer, h, this.top)
    if (h === null) this.hello = { next: 0, wait: 2 }
  }
  settle({ rollout, verdict, code, measured, threshold, credit }, trainer, ts) {
    if (code === 'quarantined' || code === 'banned') this.pause(code === 'banned' ? Infinity : threshold - measured, ts)
    const [name, group] = Object.entries(this.state.groups).find(([, { ids }]) => ids.includes(hex(rollout))) ?? []
    if (!group) return
    const { version, counter } = group, late = this.top - version > this.run.staleness / 2
    this.local.remove(`groups/${name}`)
    delete this.state.groups[name]
    if (code === 'key-too-new') this.count(trainer, threshold === null ? null : threshold - 1)
    this.window = Math.min(4096, Math.max(4, this.window + (code === 'stale' ? -1 : late ? -0.2 : 0.1))) // RCP-5
    this.say('receipt', { verdict, code, version, counter, measured, threshold, credit })
    if (verdict === 'refused') this.refused[code] = (this.refused[code] ?? 0) + 1
    else if (++this.accepted >= this.options.groups) this.end()
  }
  stand({ state, accepted, refused, credit, until }, ts) {
    const before = this.state.standing ?? { ts: 0 }
    if (ts < before.ts) return
    if (state !== before.state) this.say('standing', { state, accepted, refused, credit })
    this.state.standing = { state, ts }
    this.pause(state === 'banned' ? Infinity : state === 'quarantine' ? Number(until) - ts : 0, ts)
  }
  pause(ms, ts) { // RCP-7: the word with the latest ts holds
    if (ts < (this.paused ?? 0)) return
    const why = JSON.stringify(this.refused)
    this.paused = ts
    this.state.quiet = Date.now() + Math.min(LONGEST_QUARANTINE, ms)
    if (ms === Infinity) this.end(unfinished(`The trainer banned this key (${why}): test this client by the vectors.`))
    else if (ms > 0) this.say('quarantine', { seconds: Math.ceil(ms / 1000), why })
  }
  save() { this.local.write('state.json', JSON.stringify(this.state)) }
  /** Seals and publishes; a number and what `note` adds are on disk before anybody sees the message. */
  async send(kind, body, note = () => {}) {
    const now = Date.now(), seq = this.state.seq = Math.max(this.state.seq + 1, now)
    const envelope = structures.seal({ kind, run: this.id, seq, now, body }, this.secret)
    if (envelope.length > this.run.limits.inline_bytes) return undefined
    note(hex(structures.sha256(read('envelope', envelope).signed)))
    this.save()
    return this.peer.publish(this.topics.rollouts(structures.shardOf(this.key, this.run.shards)), envelope)
  }
  async greet() { // until a trainer has answered and a checkpoint counts for this key (HEL-1)
    const now = Date.now()
    this.h = largest(this.state.h) ?? Infinity
    if (this.top > this.h || now < this.hello.next) return
    const agent = `${ENGINE.name}/${ENGINE.version}`
    const heard = await this.send('hello', write('hello', { agent, engine: ENGINE }))
    this.hello = heard ? { next: now + 1000 * this.hello.wait, wait: 10 } : { next: now + 200, wait: 2 }
  }
  room() { // for one more message at the run's rate, less something for clocks that differ (GOS-6)
    const throttled = this.state.standing?.state === 'throttled' ? 8 : 1, now = Date.now()
    const rate = 0.95 * this.run.limits.groups_per_second / throttled, most = Math.max(1, Math.min(60 * rate, 4096))
    this.level = Math.min(most, this.level + rate * Math.max(0, now - this.filled) / 1000)
    this.filled = now
    return this.level >= 1
  }
  giveUp(name) { // a receipt for it still counts
    if (this.state.groups[name]) this.state.groups[name].given = true
    this.local.remove(`groups/${name}`)
  }
  async issue(name) { // each time sealed anew (GOS-12), after 10 s, 20 s, ... (RCP-4)
    const group = this.state.groups[name], body = this.local.read(`groups/${name}`)
    if (!group || !body) return delete this.state.groups[name] // its receipt came just now, or just before a crash
    this.level--
    const heard = await this.send('rollout', body, (id) => group.ids.push(id))
    if (heard === undefined) return this.giveUp(name) // too large for gossip: a hole, of which a few are allowed
    group.next = Date.now() + (heard ? group.wait : 1000)
    if (heard) group.wait *= 2
  }
  async work() {
    await turn()
    await this.greet()
    if (Date.now() < this.state.quiet) return sleep(100)
    for (const [name, { version, next, given }] of Object.entries(this.state.groups)) {
      if (version < this.top - 4 * (this.run.staleness + 1)) delete this.state.groups[name]
      else if (version < this.top - this.run.staleness && !given) this.giveUp(name)
      else if (!given && Date.now() >= next && this.room()) await this.issue(name)
    }
    const { ready, state } = this, waiting = Object.values(state.groups).filter(({ given }) => !given).length
    const counts = ready?.version > this.h && ready.version >= this.top - this.run.staleness
    if (!counts || waiting >= this.window || !this.room()) return sleep(50)
    const hash = hex(ready.hash), counter = state.counters[hash] ?? 0, name = `${hash.slice(0, 16)}-${counter}`
    const group = await makeGroup(this, ready, counter).catch((error) => {
      if (!(error instanceof Refused)) throw error // from such logits nothing is drawn (SMP-3)
    })
    if (group) this.local.write(`groups/${name}`, write('rollout-group', group))
    if (group) state.groups[name] = { version: ready.version, counter, ids: [], next: 0, wait: 10000 }
    state.counters[hash] = counter + 1 // a crash before this makes the same group once more
    this.save()
    return group ? this.issue(name) : sleep(50)
  }
}

function playable({ id, version, config = new Map() }) {
  const length = config.get('length') ?? 4, known = [...config.keys()].every((key) => key === 'length')
  return id === 'sort-digits' && version === '1' && known && Number.isInteger(length) && length >= 1 && length <= 64
}
/** The group of a task (chapters 06, 07); none where this client does not have its environment. */
async function makeGroup({ run, id, key }, { hash, manifest, policy }, counter) {
  const { environments, sampling: { temperature, max_tokens, stop, logprobs: form }, model } = run
  const seed = taskSeed(id, hash, manifest.beacon, key, counter), weights = environments.map(({ weight }) => weight)
  const drawn = assign(seed, weights, run.group), place = environments[drawn.environment], trajectories = []
  if (!playable(place)) return undefined
  const length = place.config?.get('length') ?? 4, level = manifest.levels?.get(place.id) ?? 0
  const { prompt, solution } = sortDigits.task(drawn.taskSeed, length, level), asked = tokensOf(prompt)
  const most = Math.min(max_tokens, model.context - asked.length), start = policy.start()
  if (most < 1) return undefined
  const first = start.feed(asked).slice()
  for (const samplerKey of drawn.samplerKeys) {
    const state = start.copy(), draws = uniforms(samplerKey, 0, most), chosen = []
    const ended = () => stop.includes(chosen.at(-1)?.token)
    while (!ended() && chosen.length < most) {
      const logits = chosen.length ? state.feed([chosen.at(-1).token]) : first
      chosen.push(choose(logits, temperature, draws[chosen.length]))
      await turn() // a long group holds up no connection
    }
    const tokens = chosen.map(({ token }) => token), answer = textOf(ended() ? tokens.slice(0, -1) : tokens)
    const reward = sortDigits.score(solution, answer, ended())
    trajectories.push({ tokens: planes([...asked, ...tokens], 'u32'), reward, finish: ended() ? 'stop' : 'length',
      segments: [[asked.length, 4, false], [tokens.length, 2, true]], components: { correct: Number(reward === 1) },
      logprobs: planes(chosen.map(({ logprob }) => logprob), form) })
  }
  return { checkpoint: hash, counter, env: place.id, engine: ENGINE, trajectories }
}
function readFlags() {
  const text = { type: 'string' }, listen = { ...text, multiple: true }, json = { type: 'boolean' }
  const options = { home: text, groups: text, seconds: text, listen, json }
  try {
    const { values, positionals: [invite, ...more] } = parseArgs({ allowPositionals: true, options })
    const [groups, seconds] = ['groups', 'seconds'].map((name) => Number(values[name] ?? Infinity))
    if (!invite || more.length || !(groups > 0 && seconds > 0)) throw new Error('One invite, and numbers above 0.')
    return { ...values, groups, seconds, ...structures.readInvite(invite) }
  } catch ({ code, message }) {
    throw unfinished(code === 'invite' ? 'This is no valid invite: copy all of it again.' : `${message} ${USE}`, 2)
  }
}
async function main() {
  const options = readFlags(), home = new Home(options.home ?? `${homedir()}/.nous-volunteer-js`)
  const volunteer = new Volunteer(options, options.run, home)
  for (const signal of ['SIGINT', 'SIGTERM']) process.once(signal, () => volunteer.end())
  if (options.seconds < Infinity) setTimeout(volunteer.end, 1000 * options.seconds, undefined)
  const ending = await Promise.race([volunteer.ended, volunteer.join(options.addresses)])
  await sleep(500) // what was published is on its way
  volunteer.say('end', { accepted: volunteer.accepted, refused: JSON.stringify(volunteer.refused) })
  await volunteer.peer?.host.stop()
  if (ending instanceof Error) throw ending
}
main().then(() => process.exit(0), ({ message, exit }) => {
  console.error(printable(exit ? message : `The client stopped (${message}); start it again, nothing is lost.`))
  process.exit(exit ?? 1)
})
