#!/usr/bin/env node
// A volunteer: joins a run by its invite, follows checkpoints, publishes groups, reads receipts (chapter 05, Joining).
import { homedir, totalmem } from 'node:os'
import { join } from 'node:path'
import { setImmediate as turn, setTimeout as sleep } from 'node:timers/promises'
import { parseArgs } from 'node:util'
import { Holdings } from './holdings.js'
import { Home } from './home.js'
import { Refused, must } from './msgpack.js'
import { Peer } from './peer.js'
import { assign, choose, loadPolicy, sortDigits, taskSeed, textOf, tokensOf, uniforms } from './policy.js'
import { hex, openCheckpoint, openReceipts, openRun, planes, read, readBitmap, readInvite, same, seal, sha256, shardOf, topics,
  write } from './structures.js'

const ENGINE = { name: 'nous-volunteer-js', version: '0.1.0', dtype: 'float32', device: 'cpu' }, USE = 'Use: node volunteer.js ' +
  'INVITE [--home FOLDER] [--groups N] [--seconds S] [--listen MULTIADDR] [--json]'
const IGNORED = ['expired', 'future-dated', 'duplicate', 'sequence-reused', 'unknown-kind', 'unsupported-version'] // GOS-2
const AHEAD = 16, LONGEST_QUARANTINE = 86460000, UPLOADS = 8

class Ending extends Error { // a sentence with a next step, and the exit code
  constructor(sentence, code = 1) { super(sentence).code = code }
}
const escape = (one) => one.split('').map((unit) => `\\u${unit.charCodeAt().toString(16).padStart(4, '0')}`).join('')
const printable = (text) => text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, escape) // texts of strangers (CNV-1)

class Volunteer {
  constructor(options, run, home) {
    Object.assign(this, { options, id: run, home, known: new Map(), seen: new Map(), accepted: 0, refused: {}, window: 32,
      hello: { next: 0, wait: 2 }, level: 1, filled: Date.now(), local: new Home(home.path(join('runs', hex(run)))) })
    this.ended = new Promise((resolve) => (this.end = (ending) => resolve(this.over = ending ?? true)))
  }
  get top() { return this.newest?.version ?? -1 } // the newest version that is known
  say(event, fields) {
    const told = Object.entries(fields).filter(([, value]) => value !== null && value !== '')
    const text = () => `${event}: ${told.map(([name, value]) => `${name} ${value}`).join(', ')}`
    console.log(printable(this.options.json ? JSON.stringify({ event, ...fields }) : text()))
  }

  async join(addresses) {
    if (this.local.read('equivocation')) throw new Ending(`This run's trainer contradicted itself; the proof is in ` +
      `${this.local.path('equivocation')}. Ask the run's owner, and remove the file to go on.`)
    Object.assign(this, this.home.identity())
    this.peer = await Peer.start(this.seed, this.options.listen).catch(({ message }) => {
      throw new Ending(`This address cannot be listened on (${message}): choose another --listen.`, 2)
    })
    this.holdings = new Holdings(this.local, this.peer)
    for (const address of this.peer.addresses) this.say('listening', { address })
    this.peer.keep(addresses)
    for (const until = Date.now() + 30000; !this.newest; await sleep(500)) {
      await this.askHeads()
      if (this.newest || Date.now() < until) continue
      if (this.run) break // a checkpoint may come later
      throw new Ending(`Nobody answered for this run at ${addresses.join(', ')} within 30 s. Ask whoever gave you the ` +
        'invite whether the run is up, and look at your network.')
    }
    this.check(this.run)
    this.state = { seq: 0, counters: {}, h: {}, groups: {}, quiet: 0, ...JSON.parse(this.local.read('state.json') ?? '{}') }
    for (const [trainer, h] of Object.entries(this.state.h)) if (h > this.top) delete this.state.h[trainer]
    this.topics = topics(this.id)
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
      if (checkpoint && this.run) this.learn(openCheckpoint(checkpoint, this.id, this.run), checkpoint)
    } catch (error) { // another peer may know better
      if (error.code === 'unsupported-version') this.end(new Ending('This run speaks another protocol: update this client.'))
    }
  }
  meet(envelope) {
    const { manifest } = openRun(envelope, this.id), head = this.local.read('head')
    Object.assign(this, { run: manifest, envelope })
    this.local.write('run', envelope)
    if (head) this.learn(openCheckpoint(head, this.id, manifest), head) // remembered over restarts (CKP-9, CKP-17)
  }
  check({ model, environments }) { // before anything is downloaded
    const needed = 8 * Number(model.parameters) + 4e8, names = environments.map(({ id, version }) => `${id} ${version}`)
    const refuse = (wrong, why) => { if (wrong) throw new Ending(`${why} Take part in it with another client or machine.`) }
    refuse(model.family !== 'llama', `This run's model is of the family ${model.family}; this client can do llama.`)
    refuse(needed > totalmem(), `This run's model needs ${needed} bytes of memory; this machine has ${totalmem()}.`)
    refuse(!environments.some(playable), `This run's environments are ${names.join(', ')}; this client has sort-digits 1.`)
  }

  /** Takes note of a genuine checkpoint: the newest is followed, two of one version by one key end the client. */
  learn({ head, hash, content, manifest }, envelope) {
    const version = Number(manifest.version), slot = `${version} ${hex(head.from)}`, before = this.known.get(slot)
    if (before && !same(before.hash, hash)) {
      this.local.write('equivocation', write('equivocation', { first: before.envelope, second: envelope }))
      return this.end(new Ending(`A trainer signed two checkpoints of version ${version}. Both are in ` +
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
      this.holdings.keep([...new Set([this.newest, this.ready])])
      for (const old of Object.keys(this.state.counters).slice(0, -64)) delete this.state.counters[old]
      this.say('checkpoint', { version: target.version, hash: hex(target.hash), by: deltas ? 'deltas' : 'files' })
    } catch ({ message }) {
      this.say('trouble', { version: this.top, why: message, next: 'it is tried again' })
      await sleep(1000)
    }
    this.following = false
  }

  judge(data, open, use) { // the verdict on a message of the checkpoints or the receipts topic (GOS-1)
    const now = Date.now(), names = (head, id) => [hex(id), `${hex(head.from)} ${head.seq}`]
    const known = (head, id) => ['duplicate', 'sequence-reused'].forEach((code, i) => must(!this.seen.has(names(head, id)[i]), code))
    for (const [name, exp] of this.seen) if (exp <= now) this.seen.delete(name)
    try {
      const opened = open(data, this.id, this.run, { now, known, limit: 1000000 })
      for (const name of names(opened.head, opened.id)) this.seen.set(name, opened.head.exp)
      use(opened)
      return 'accept'
    } catch (error) {
      if (!(error instanceof Refused)) this.end(error)
      return IGNORED.includes(error.code) ? 'ignore' : 'reject'
    }
  }
  serve() {
    const wrong = (run) => same(run, this.id) ? undefined : { error: 'wrong-run' }
    this.peer.serve('/nous/head/1', 1024, 8, (bytes) => write('head-reply', wrong(read('head-request', bytes).run) ??
      { run: this.envelope, checkpoint: this.newest?.envelope }))
    this.peer.serve('/nous/blob/1', 1024, 16, (bytes, open) => {
      const data = this.holdings.get(read('blob-request', bytes).hash)
      return write('blob-reply', open > UPLOADS ? { error: 'busy' } : data ? { data } : { error: 'not-found' })
    })
    this.peer.serve('/nous/have/1', 69632, 2, (bytes) => {
      const { run, checkpoint, have } = read('have-request', bytes)
      const bits = [this.ready, this.newest].filter((one) => one && same(one.hash, checkpoint)).map((one) => this.holdings.held(one))[0]
      if (bits && have) readBitmap(have, bits.total)
      return write('have-reply', wrong(run) ?? (bits ? { have: bits.have } : { error: 'unknown-checkpoint' }))
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
    if (Number.isInteger(h) && h >= -1 && h <= this.top + AHEAD) this.state.h[trainer] = h
  }
  settle({ rollout, verdict, code, measured, threshold, credit }, trainer, ts) {
    if (code === 'quarantined' || code === 'banned') this.pause(code === 'banned' ? Infinity : threshold - measured, ts)
    const [name, group] = Object.entries(this.state.groups).find(([, { ids }]) => ids.includes(hex(rollout))) ?? []
    if (!group) return
    delete this.state.groups[name]
    if (code === 'key-too-new' && threshold === null) Object.assign(this, { hello: { next: 0, wait: 2 } }).state.h = {}
    else if (code === 'key-too-new') this.count(trainer, threshold - 1)
    const change = code === 'stale' ? -1 : this.top - group.version > this.run.staleness / 2 ? -0.2 : 0.1 // RCP-5
    this.window = Math.min(4096, Math.max(4, this.window + change))
    this.local.remove(`groups/${name}`)
    this.say('receipt', { verdict, code, version: group.version, counter: group.counter, measured, threshold, credit })
    verdict === 'accepted' ? this.accepted++ : this.refused[code] = (this.refused[code] ?? 0) + 1
    if (this.accepted >= this.options.groups) this.end()
  }
  stand({ state, accepted, refused, credit, until }, ts) {
    if (ts < (this.state.standing?.ts ?? 0)) return
    if (this.state.standing?.state !== state) this.say('standing', { state, accepted, refused, credit })
    this.state.standing = { state, ts }
    this.pause(state === 'banned' ? Infinity : state === 'quarantine' ? Number(until) - ts : 0, ts)
  }
  pause(ms, ts) { // RCP-7: the word with the latest ts holds
    if (ts < (this.paused ?? 0)) return
    const why = Object.entries(this.refused).map(([code, count]) => `${count} x ${code}`).join(', ')
    this.paused = ts
    this.state.quiet = Date.now() + Math.min(LONGEST_QUARANTINE, ms)
    if (ms === Infinity) this.end(new Ending(`The trainer banned this key (${why}). Run the vectors against this client.`))
    else if (ms > 0) this.say('quarantine', { seconds: Math.ceil(ms / 1000), why })
  }

  save() { this.local.write('state.json', JSON.stringify(this.state)) }
  /** Seals and publishes; a number and what `note` adds to the state are on disk before anybody sees the message. */
  async send(kind, body, note = () => {}) {
    this.state.seq = Math.max(this.state.seq + 1, Date.now())
    const envelope = seal({ kind, run: this.id, seq: this.state.seq, now: Date.now(), body }, this.secret)
    if (envelope.length > this.run.limits.inline_bytes) return undefined
    note(hex(sha256(read('envelope', envelope).signed)))
    this.save()
    return this.peer.publish(this.topics.rollouts(shardOf(this.key, this.run.shards)), envelope)
  }
  /** Says hello until a trainer has answered and a checkpoint counts for this key (HEL-1). */
  async greet() {
    const now = Date.now(), answers = Object.values(this.state.h)
    this.h = answers.length ? Math.max(...answers) : Infinity
    if (this.top > this.h || now < this.hello.next) return
    const heard = await this.send('hello', write('hello', { agent: `${ENGINE.name}/${ENGINE.version}`, engine: ENGINE }))
    this.hello = heard ? { next: now + 1000 * this.hello.wait, wait: 10 } : { next: now + 200, wait: 2 }
  }
  room() { // for one more message at the run's rate, less something for clocks that differ (GOS-6)
    const rate = 0.95 * this.run.limits.groups_per_second / (this.state.standing?.state === 'throttled' ? 8 : 1), now = Date.now()
    this.level = Math.min(Math.max(1, Math.min(60 * rate, 4096)), this.level + rate * Math.max(0, now - this.filled) / 1000)
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
    const waiting = Object.values(this.state.groups).filter(({ given }) => !given).length
    const counts = this.ready?.version > this.h && this.ready.version >= this.top - this.run.staleness
    if (!counts || waiting >= this.window || !this.room()) return sleep(50)
    const { ready, state } = this, hash = hex(ready.hash), counter = state.counters[hash] ?? 0, name = `${hash.slice(0, 16)}-${counter}`
    const group = await makeGroup(this, ready, counter)
    if (group) this.local.write(`groups/${name}`, write('rollout-group', group))
    if (group) state.groups[name] = { version: ready.version, counter, ids: [], next: 0, wait: 10000 }
    state.counters[hash] = counter + 1 // a crash before this makes the same group once more
    this.save()
    if (group) await this.issue(name)
  }
}

function playable({ id, version, config = new Map() }) {
  const length = config.get('length') ?? 4, known = [...config.keys()].every((key) => key === 'length')
  return id === 'sort-digits' && version === '1' && known && Number.isInteger(length) && length >= 1 && length <= 64
}

/** The group of a task (chapters 06, 07); none where this client does not have its environment. */
async function makeGroup({ run, id, key }, { hash, manifest, policy }, counter) {
  const { environments, sampling: { temperature, max_tokens, stop, logprobs: form }, model } = run, trajectories = []
  const seed = taskSeed(id, hash, manifest.beacon, key, counter)
  const drawn = assign(seed, environments.map(({ weight }) => weight), run.group), place = environments[drawn.environment]
  if (!playable(place)) return undefined
  const level = manifest.levels?.get(place.id) ?? 0
  const { prompt, solution } = sortDigits.task(drawn.taskSeed, place.config?.get('length') ?? 4, level), asked = tokensOf(prompt)
  const most = Math.min(max_tokens, model.context - asked.length), start = policy.start(), first = start.feed(asked).slice()
  for (const samplerKey of drawn.samplerKeys) {
    const state = start.copy(), draws = uniforms(samplerKey, 0, most), tokens = [], logprobs = []
    let [logits, ended] = [first, false]
    while (!ended && tokens.length < most) {
      if (tokens.length) logits = state.feed(tokens.slice(-1))
      const { token, logprob } = choose(logits, temperature, draws[tokens.length])
      ended = stop.includes(tokens[logprobs.push(logprob) - 1] = token)
      await turn() // a long group holds up no connection
    }
    const reward = sortDigits.score(solution, textOf(ended ? tokens.slice(0, -1) : tokens), ended)
    const part = (list, role, trained) => [list.length, role, trained]
    trajectories.push({ tokens: planes([...asked, ...tokens], 'u32'), logprobs: planes(logprobs, form), reward,
      segments: [part(asked, 4, false), part(tokens, 2, true)], finish: ended ? 'stop' : 'length',
      components: new Map([['correct', Number(reward === 1)]]) })
  }
  return { checkpoint: hash, counter, env: place.id, engine: ENGINE, trajectories }
}

function readFlags() {
  try {
    const text = { type: 'string' }, flags = { home: text, groups: text, seconds: text, listen: { ...text, multiple: true } }
    const { values, positionals } = parseArgs({ allowPositionals: true, options: { ...flags, json: { type: 'boolean' } } })
    const [groups, seconds] = ['groups', 'seconds'].map((name) => Number(values[name] ?? Infinity))
    if (positionals.length !== 1 || !(groups > 0) || !(seconds > 0)) throw new Error('One invite, and numbers above 0.')
    return { ...values, groups, seconds, invite: positionals[0] }
  } catch ({ message }) { throw new Ending(`${message} ${USE}`, 2) }
}
function openInvite(text) {
  try { return readInvite(text) } catch { throw new Ending('This is no valid invite: copy the whole string again.', 2) }
}

async function main() {
  const options = readFlags(), { run, addresses } = openInvite(options.invite)
  const volunteer = new Volunteer(options, run, new Home(options.home ?? join(homedir(), '.nous-volunteer-js')))
  for (const signal of ['SIGINT', 'SIGTERM']) process.once(signal, () => volunteer.end())
  if (options.seconds < Infinity) setTimeout(volunteer.end, 1000 * options.seconds, undefined)
  const ending = await Promise.race([volunteer.ended, volunteer.join(addresses)])
  await sleep(500) // what was published is on its way
  volunteer.say('end', { accepted: volunteer.accepted, refused: JSON.stringify(volunteer.refused) })
  await volunteer.peer?.host.stop()
  if (ending instanceof Error) throw ending
}
main().then(() => process.exit(0), (error) => {
  const text = error instanceof Ending ? error.message : `The client stopped (${error.message}); start it again, nothing is lost.`
  console.error(printable(text))
  process.exit(error.code === 2 ? 2 : 1)
})
