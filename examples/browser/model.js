/** A graph that `fastweights export MODEL model.onnx` wrote, run by onnxruntime-web in WebAssembly. */

const PIECE = 64; // tokens of a prompt that are read at once
const BREATH = 30; // milliseconds after which the page gets a turn
const ARRAYS = { float32: Float32Array, int64: BigInt64Array };
const METADATA = 14, KEY = 1, VALUE = 2; // fields of ONNX's ModelProto and StringStringEntryProto
const CHARACTER = 4; // bytes of the longest character in UTF-8
const UNCERTAIN = "\ufffd"; // what the bytes of a character that has only begun are decoded to

/**
 * Load `model.onnx`, `tokenizer.json` and `tokenizer_config.json` from a folder.
 *
 * @param {string} folder ends with a slash
 * @param {(done: number, all: number) => void} progress is told how many bytes of the graph are here
 *   and how many it has, 0 if the server does not say
 * @returns {Promise<LanguageModel>}
 */
export async function load(folder, progress = () => {}) {
  const [ort, { Tokenizer }] = await Promise.all([
    library("onnxruntime-web", () => import("onnxruntime-web/wasm")),
    library("@huggingface/tokenizers", () => import("@huggingface/tokenizers")),
  ]);
  const words = await json(`${folder}tokenizer.json`);
  const settings = await json(`${folder}tokenizer_config.json`);
  const graph = await bytes(`${folder}model.onnx`, progress);
  const facts = description(graph);
  let session;
  try {
    session = await ort.InferenceSession.create(graph, { executionProviders: ["wasm"], logSeverityLevel: 3 });
  } catch (error) {
    throw new Error(
      "onnxruntime-web cannot run this model.onnx. A graph with the operators of --domain ai.onnx needs a " +
      "newer one: export the model without --domain. " + told(error), { cause: error });
  }
  return new LanguageModel(ort, session, new Tokenizer(words, settings), settings, facts, graph.length);
}

export class LanguageModel {
  /** @type {number} bytes of the graph */ size;
  /** @type {boolean} whether the state grows with the text, as that of softmax attention does */ grows;

  constructor(ort, session, tokenizer, settings, facts, size) {
    const states = session.inputMetadata.filter(({ name }) => name.startsWith("past_"));
    Object.assign(this, { ort, session, tokenizer, states, size });
    this.grows = states.some(({ shape }) => shape.includes("cached"));
    this.ends = new Set([facts.eos_token_id ?? []].flat());
    const begin = settings.bos_token?.content ?? settings.bos_token;
    this.begin = begin == null ? undefined : tokenizer.token_to_id(begin);
  }

  /**
   * The tokens of a prompt; an empty one is the token that begins a text.
   *
   * @param {string} prompt
   * @returns {number[]}
   */
  encode(prompt) {
    const before = this.tokenizer.encode("").ids.filter((id) => id === this.begin);
    const ids = [...before, ...this.tokenizer.encode(prompt, { add_special_tokens: false }).ids];
    if (ids.length || this.begin !== undefined) return ids.length ? ids : [this.begin];
    throw new Error("The prompt is empty, and the tokenizer has no token that begins a text. Write a word.");
  }

  /**
   * Continue a prompt, token by token, in a memory that does not grow.
   *
   * @param {string} prompt
   * @param {{temperature: number, tokens: number, signal?: AbortSignal}} options a temperature of 0
   *   takes the likeliest token; it ends after so many tokens, at the end of the text, or when told to
   * @yields {{text: string, tokens: number, state: number}} the text that became certain, which may be
   *   empty, how many tokens there are so far, and the bytes of the state
   */
  async *generate(prompt, { temperature, tokens, signal }) {
    const ids = this.encode(prompt);
    const [stream, pause] = [new TextStream(this.tokenizer, ids), breather()];
    let read = { states: this.states.map((state) => this.#tensor(state.type, empty(state.shape))) };
    for (let i = 0; i < ids.length; i += PIECE) {
      read = await this.#read(ids.slice(i, i + PIECE), read.states);
      await pause();
      if (signal?.aborted) return;
    }
    let written = 0;
    while (written < tokens && !signal?.aborted) {
      const token = draw(read.logits, temperature);
      if (this.ends.has(token)) break;
      yield { text: stream.push(token), tokens: ++written, state: bytesOf(read.states) };
      if (written < tokens) read = await this.#read([token], read.states);
      await pause();
    }
    yield { text: stream.close(), tokens: written, state: bytesOf(read.states) };
  }

  /** The logits after the last of these tokens, and the states. */
  async #read(ids, states) {
    const past = states.map((state, i) => [`past_${i}`, state]);
    const tokens = this.#tensor("int64", [1, ids.length], ids);
    const { logits, ...present } = await this.session.run({ input_ids: tokens, ...Object.fromEntries(past) });
    const last = logits.data.subarray(-logits.dims.at(-1));
    return { logits: last, states: states.map((_, i) => present[`present_${i}`]) };
  }

  #tensor(type, dims, numbers) {
    const data = new ARRAYS[type](dims.reduce((a, b) => a * b, 1));
    numbers?.forEach((number, i) => { data[i] = BigInt(number); });
    return new this.ort.Tensor(type, data, dims);
  }
}

/**
 * Turns tokens into text as soon as it is certain: one character's bytes may span several tokens. It
 * remembers only a few tokens, however long the text grows.
 */
class TextStream {
  /** @param {number[]} before the tokens whose text is shown already */
  constructor(tokenizer, before) {
    Object.assign(this, { tokenizer, recent: before.slice(-CHARACTER) });
    this.shown = this.#decode().length;
  }

  push(token) {
    this.recent.push(token);
    const text = this.#decode();
    const certain = text.length - text.endsWith(UNCERTAIN);
    const fresh = text.slice(this.shown, certain);
    this.shown = Math.max(this.shown, certain);
    this.#forget();
    return fresh;
  }

  /** The rest: a replacement character if the text ends inside a character. */
  close() {
    return this.#decode().slice(this.shown);
  }

  #forget() {
    if (this.recent.length < 4 * CHARACTER) return;
    const hidden = this.#decode().length - this.shown;
    this.recent = this.recent.slice(-CHARACTER);
    this.shown = this.#decode().length - hidden;
  }

  #decode() {
    const options = { skip_special_tokens: true, clean_up_tokenization_spaces: false };
    return this.recent.length ? this.tokenizer.decode(this.recent, options) : "";
  }
}

/** A token of these logits; at temperature 0 the likeliest. */
function draw(logits, temperature) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  if (temperature === 0) return best;
  const weights = Float64Array.from(logits, (x) => Math.exp((x - logits[best]) / temperature));
  let left = Math.random() * weights.reduce((a, b) => a + b);
  const token = weights.findIndex((weight) => (left -= weight) < 0);
  return token < 0 ? best : token;
}

const empty = (shape) => shape.map((n) => ({ batch: 1, cached: 0 })[n] ?? n);
const bytesOf = (states) => states.reduce((sum, state) => sum + state.data.byteLength, 0);
const told = (error) => `The browser says: “${String(error?.message ?? error).replace(/[.\s]+$/, "")}”.`;

/** A function that lets the page draw and hear clicks, every `BREATH` milliseconds. */
function breather() {
  let last = performance.now();
  return async () => {
    if (performance.now() - last < BREATH) return;
    await new Promise((resolve) => setTimeout(resolve));
    last = performance.now();
  };
}

async function library(name, importing) {
  try {
    return await importing();
  } catch (error) {
    throw new Error(`${name} is not here. Run \`npm install\` in this folder, then reload. ${told(error)}`, { cause: error });
  }
}

async function fetched(address) {
  const answer = await fetch(address).catch((error) => {
    throw new Error(`${address} cannot be read. Is the server still running? ${told(error)}`, { cause: error });
  });
  if (answer.ok) return answer;
  throw new Error(
    `The server has no ${address} (status ${answer.status}). \`fastweights export MODEL model.onnx\` writes it; ` +
    "run that in this folder, then reload.");
}

async function json(address) {
  const answer = await fetched(address);
  try {
    return await answer.json();
  } catch (error) {
    throw new Error(`${address} is damaged. Export the model again. ${told(error)}`, { cause: error });
  }
}

async function bytes(address, progress) {
  const answer = await fetched(address);
  const all = Number(answer.headers.get("content-length") ?? 0);
  const parts = [];
  let done = 0;
  for (let reader = answer.body.getReader(), part; !(part = await reader.read()).done;) {
    parts.push(part.value);
    progress((done += part.value.length), all);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

/** What `fastweights export` says of the model in the graph's metadata. */
function description(graph) {
  try {
    for (const [field, value] of fields(graph)) {
      if (field !== METADATA) continue;
      const entry = new Map(fields(value)), text = (part) => new TextDecoder().decode(part);
      if (text(entry.get(KEY)) === "fastweights") return JSON.parse(text(entry.get(VALUE)));
    }
  } catch (error) {
    throw new Error(`model.onnx is damaged. Export the model again. ${told(error)}`, { cause: error });
  }
  throw new Error("model.onnx is no graph of this library. Write one by `fastweights export MODEL model.onnx`.");
}

/** (number, value) of each field of a message of protocol buffers. */
function* fields(message) {
  let at = 0;
  const varint = () => {
    let [value, scale] = [0, 1];
    for (; message[at] >= 128; scale *= 128) value += (message[at++] - 128) * scale;
    return value + message[at++] * scale;
  };
  const take = (length) => message.subarray(at, (at += length));
  while (at < message.length) {
    const tag = varint(), kind = tag % 8, number = (tag - kind) / 8;
    const read = { 0: varint, 1: () => take(8), 2: () => take(varint()), 5: () => take(4) }[kind];
    if (!read) throw new Error(`it has a field of kind ${kind}.`);
    yield [number, read()];
  }
}
