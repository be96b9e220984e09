// What a verifier measures of others' groups (chapters 06 and 08). Only the adapter asks for it.
import { must } from './msgpack.js'
import { intervals } from './tasks.js'

/** How far `uniform` lies from the interval of `token` (SMP-5), and the token's log-prob. */
export function distance(logits, temperature, uniform, token) {
  const { sums, total, logprob } = intervals(logits, temperature), point = uniform * total
  const beside = Math.max((token > 0 ? sums[token - 1] : 0) - point, point - sums[token], 0)
  return { distance: beside / total, logprob: logprob(token) }
}

/** VER-10. */
export const limitAt = ({ mean, limit }, weight, reference) =>
  mean + (limit - mean) * Math.sqrt(Math.max(1, reference / Math.max(1, weight)))

/** VER-4, VER-5: `trajectories` have `reported` and `recomputed` log-probs and `distances` (in a free run none). */
export function verify({ logprobs, distances, distance_max, tokens }, trajectories) {
  const sum = (values) => values.reduce((a, b) => a + b, 0), parts = trajectories.filter((part) => part.reported.length)
  must(parts.length, 'segments')
  const all = (name) => parts.flatMap((part) => part[name] ?? [])
  const group = { reported: all('reported'), recomputed: all('recomputed'), distances: all('distances') }
  const figures = [group, ...parts].map(({ reported, recomputed, distances = [] }) => {
    const weight = sum(recomputed.map((q) => isNaN(q) ? 1 : 1 - 0.9 * Math.exp(q)))
    const mad = sum(reported.map((p, j) => Math.abs(p - recomputed[j]))) / weight
    return { weight, mad, distance: sum(distances) / weight, largest: distances.reduce((a, b) => Math.max(a, b), 0) }
  })
  const within = (code, value, limit) => must(value <= limit, code, value, limit) // NaN never is
  for (const one of figures) {
    within('logprob-mismatch', one.mad, limitAt(logprobs, one.weight, tokens))
    within('sampling-mismatch', one.distance, limitAt(distances, one.weight, tokens))
    within('sampling-mismatch', one.largest, distance_max)
  }
  return figures[0]
}
