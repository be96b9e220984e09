// Files of a checkpoint (chapter 09): chunks, chains, safetensors, deltas.
import { Refused } from "./msgpack.js";

const widths = { BOOL: 1, U8: 1, I8: 1, F8_E4M3: 1, F8_E5M2: 1, F8_E8M0: 1, U16: 2, I16: 2, F16: 2, BF16: 2, U32: 4, I32: 4, F32: 4,
  U64: 8, I64: 8, F64: 8, C64: 8 };
const refuse = (wrong, code) => {
  if (wrong) throw new Refused(code);
};

// JSON.parse tells whether it is JSON; it rounds large integers and keeps one of two equal names, so it is read again.
function strictJson(text) {
  JSON.parse(text);
  const tokens = text.match(/"(?:[^"\\]+|\\.)*"|[{}[\]]|[^\s,:{}[\]"]+/g);
  let at = 0;
  const value = () => {
    const token = tokens[at++];
    if (token === "[") {
      const list = [];
      while (tokens[at] !== "]") list.push(value());
      return at++, list;
    }
    if (token !== "{") return /^-?\d+$/.test(token) ? BigInt(token) : JSON.parse(token);
    const map = new Map();
    while (tokens[at] !== "}") {
      const name = JSON.parse(tokens[at++]);
      refuse(map.has(name), "malformed");
      map.set(name, value());
    }
    return at++, map;
  };
  return value();
}

/** The tensors of a safetensors file by name; `data` are views of the file. All of DLT-1. */
export function readSafetensors(bytes) {
  refuse(bytes.length < 8, "size-mismatch");
  const file = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.length);
  const size = file.readBigUInt64LE();
  refuse(size > 16_000_000n, "oversize");
  const begin = 8 + Number(size);
  refuse(begin > file.length, "size-mismatch");
  const header = file.subarray(8, begin);
  refuse(header.reduce((n, byte) => n + (byte === 0x5b || byte === 0x7b), 0) > 196_610, "out-of-range");
  let members;
  try {
    members = strictJson(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(header));
  } catch {
    throw new Refused("malformed"); // also where it is nested deeper than the stack
  }
  refuse(!(members instanceof Map), "malformed");
  members.delete("__metadata__");
  const sizes = (list) => Array.isArray(list) && list.every((n) => typeof n === "bigint" && n >= 0n && n < 1n << 63n);
  const tensors = Array.from(members, ([name, member]) => {
    const [dtype, shape, offsets] = ["dtype", "shape", "data_offsets"].map((key) => member instanceof Map && member.get(key));
    refuse(typeof dtype !== "string" || !sizes(shape) || !sizes(offsets) || offsets.length !== 2, "malformed");
    refuse(!Object.hasOwn(widths, dtype), "unknown-dtype");
    return { name, dtype, shape, offsets, width: widths[dtype] };
  });
  const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  tensors.sort((a, b) => order(a.offsets[0], b.offsets[0]) || order(a.offsets[1], b.offsets[1]));
  let end = 0n;
  for (const tensor of tensors) {
    const most = BigInt(file.length); // products beyond the file are not multiplied on: shapes may be long
    const bytesOf = tensor.shape.includes(0n) ? 0n : tensor.shape.reduce((n, side) => (n > most ? n : n * side), BigInt(tensor.width));
    refuse(tensor.offsets[0] !== end || tensor.offsets[1] - end !== bytesOf, "size-mismatch");
    end = tensor.offsets[1];
    refuse(end > most, "size-mismatch");
    tensor.data = file.subarray(begin + Number(tensor.offsets[0]), begin + Number(end));
  }
  refuse(begin + Number(end) !== file.length, "size-mismatch");
  return new Map(tensors.map((tensor) => [tensor.name, tensor]));
}

/** The values of a tensor in float 32. */
export function widen(tensor, length) {
  refuse(!tensor || !["F32", "BF16"].includes(tensor.dtype) || tensor.data.length !== length * tensor.width, "wrong-type");
  const bits = (_, i) => (tensor.width === 4 ? tensor.data.readUInt32LE(4 * i) : tensor.data.readUInt16LE(2 * i) << 16);
  return new Float32Array(Uint32Array.from({ length }, bits).buffer);
}
