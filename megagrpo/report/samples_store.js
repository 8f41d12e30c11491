// Samples of a page, as `samples`: numbers of all of them at once, texts and tokens from the chunk that has them.
"use strict";

const samples = (() => {
  const OPEN_CHARACTERS = 120e6; // of texts that stay open
  const NONE = -1;
  const SOLVED = 1;
  const MASKED = 2;
  const FAILED = 4;
  const AGENT = 8;
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const HALVES = halves();

  /** Values of all float16 numbers, by their bits: not every browser has Float16Array. */
  function halves() {
    const values = new Float32Array(65536);
    for (let bits = 0; bits < 65536; bits++) {
      const exponent = (bits >> 10) & 31;
      const fraction = bits & 1023;
      const size =
        exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : fraction * 2 ** -24;
      values[bits] = bits & 0x8000 ? -size : size;
    }
    return values;
  }

  /** A column of texts: their bytes end to end, and where each ends in the text that they are. */
  class Texts {
    constructor(columns, name) {
      this.bytes = columns[name];
      this.ends = columns[`${name}_ends`];
    }

    get whole() {
      if (this.text === undefined) {
        this.text = decoder.decode(this.bytes);
        this.bytes = null;
      }
      return this.text;
    }

    at(index) {
      return this.whole.slice(index ? this.ends[index - 1] : 0, this.ends[index]);
    }

    /** Calls found(index) for each text in which the pattern, global, is found. */
    search(pattern, found) {
      const { whole, ends } = this;
      let index = 0;
      pattern.lastIndex = 0;
      for (let match = pattern.exec(whole); match; match = pattern.exec(whole)) {
        while (index < ends.length && ends[index] <= match.index) index++;
        if (index === ends.length) return;
        if (match.index + match[0].length <= ends[index]) found(index);
        pattern.lastIndex = ends[index];
      }
    }
  }

  /** Chunks of one kind, opened when needed; of texts that were opened the latest ones are kept. */
  class Chunks {
    constructor(name, first, columns) {
      Object.assign(this, { name, first, columns, open: new Map(), held: 0 });
    }

    /** Number of the chunk that has an item. */
    holding(item) {
      let low = 0;
      let high = this.first.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (this.first[middle] <= item) low = middle;
        else high = middle - 1;
      }
      return low;
    }

    async chunk(number) {
      let entry = this.open.get(number);
      if (entry) this.open.delete(number);
      else entry = { made: this.read(number), size: 0 };
      this.open.set(number, entry);
      const made = await entry.made;
      if (!entry.size) {
        entry.size = made.size;
        this.held += made.size;
        for (const [other, { size }] of this.open) {
          if (this.held <= OPEN_CHARACTERS || other === number) break;
          this.open.delete(other);
          this.held -= size;
        }
      }
      return made;
    }

    async read(number) {
      const columns = await report.load(`${this.name}_${number}`, false);
      const made = { first: this.first[number], columns };
      made.size = Object.values(columns).reduce((total, column) => total + column.length, 1);
      for (const name of this.columns) made[name] = new Texts(columns, name);
      return made;
    }
  }

  class Store {
    constructor(columns) {
      Object.assign(this, columns);
      this.previews = new Texts(columns, "preview");
      this.promptPreviews = new Texts(columns, "prompt_preview");
      this.texts = new Chunks(`${columns.chunks}_texts`, columns.first.texts, ["response", "agent", "detail"]);
      this.prompts = new Chunks(`${columns.chunks}_prompts`, columns.first.prompts, ["prompt", "messages", "truth", "ability"]);
      this.tokenChunks = new Chunks(`${columns.chunks}_tokens`, columns.first.tokens, []);
      this.figuresOf = new Int32Array(this.rows).fill(NONE);
      columns.figured.forEach((row, place) => (this.figuresOf[row] = place));
    }

    name(column, row) {
      return this.names[column][this[column][row]];
    }

    promptId(row) {
      return this.prompt_ids[this.prompt[row]];
    }

    is(row, flag) {
      return (this.flags[row] & flag) !== 0;
    }

    /** What finds the sample again, also in a page that is made later. */
    key(row) {
      return [this.runs[this.run[row]], this.step[row], this.name("set", row), this.promptId(row), this.sample[row]].join("~");
    }

    rowOf(key) {
      for (let row = 0; row < this.rows; row++) {
        if (key.includes(`~${this.step[row]}~`) && this.key(row) === key) return row;
      }
      return NONE;
    }

    /** All texts of a sample. */
    async full(row) {
      const chunk = await this.texts.chunk(this.texts.holding(row));
      const number = this.prompt[row];
      const prompts = await this.prompts.chunk(this.prompts.holding(number));
      const at = row - chunk.first;
      const asked = number - prompts.first;
      return {
        row,
        response: chunk.response.at(at),
        agent: parsed(chunk.agent.at(at)),
        prompt: prompts.prompt.at(asked),
        messages: parsed(prompts.messages.at(asked)),
        truth: prompts.truth.at(asked),
        ability: prompts.ability.at(asked),
        answer: null,
        error: "",
        masked: "",
        parts: [],
        notes: [],
        ...parsed(chunk.detail.at(at)),
      };
    }

    /** Figures of a sample's tokens by name; null if the page has none. */
    async tokensOf(row) {
      const place = this.figuresOf[row];
      if (place === NONE) return null;
      const { columns, first } = await this.tokenChunks.chunk(this.tokenChunks.holding(place));
      this.dictionary ??= report.load(`${this.chunks}_dictionary`, false);
      const dictionary = await this.dictionary;
      let begin = 0;
      for (let other = first; other < place; other++) begin += columns.size[other - first];
      const size = columns.size[place - first];
      const cut = (name) => columns[name].subarray(begin, begin + size);
      const figures = { size, version: Array.from(cut("version")), ids: [], texts: [] };
      for (const name of ["logprob", "difference", "entropy", "advantage"]) {
        figures[name] = Float32Array.from(cut(name), (bits) => HALVES[bits]);
      }
      for (const code of cut("code")) {
        figures.ids.push(dictionary.ids[code]);
        figures.texts.push(dictionary.texts[code]);
      }
      return figures;
    }

    /** Rows of the same prompt, in any run and at any step, in the same set. */
    ofPrompt(row) {
      const id = this.promptId(row);
      const same = new Uint8Array(this.prompt_ids.length);
      this.prompt_ids.forEach((other, number) => (same[number] = other === id));
      const found = [];
      for (let other = 0; other < this.rows; other++) {
        if (same[this.prompt[other]] && this.set[other] === this.set[row]) found.push(other);
      }
      return found;
    }

    /**
     * Marks rows whose prompt, response, agent's trace or prompt id has the pattern: hits, Uint8Array [rows]. Calls
     * `went(done)` with the share that is searched, newest samples first; ends early once `went` gives false.
     */
    async search(pattern, hits, went) {
      const inPrompt = new Uint8Array(this.prompt_ids.length);
      const total = this.first.prompts.length + this.first.texts.length;
      this.prompt_ids.forEach((id, number) => {
        pattern.lastIndex = 0;
        if (pattern.test(id)) inPrompt[number] = 1;
      });
      for (let number = 0; number < this.first.prompts.length; number++) {
        const chunk = await this.prompts.chunk(number);
        chunk.prompt.search(pattern, (index) => (inPrompt[chunk.first + index] = 1));
      }
      for (let row = 0; row < this.rows; row++) hits[row] = inPrompt[this.prompt[row]];
      for (let number = this.first.texts.length - 1; number >= 0; number--) {
        const chunk = await this.texts.chunk(number);
        chunk.response.search(pattern, (index) => (hits[chunk.first + index] = 1));
        chunk.agent.search(pattern, (index) => (hits[chunk.first + index] = 1));
        if (!went((total - number) / total)) return;
      }
    }
  }

  function parsed(text) {
    if (!text) return null;
    try {
      return JSON.parse(text);
    } catch {
      return text;
    }
  }

  // --- text that others wrote ------------------------------------------------------------------------------------------

  const HIDDEN =
    /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}])\1*/gu;

  /** Text as nodes. Characters that are not seen, or that turn others round, are shown by their numbers. */
  function shown(text) {
    const nodes = [];
    let end = 0;
    const whole = text.toWellFormed ? text.toWellFormed() : text;
    for (const match of whole.matchAll(HIDDEN)) {
      if (match.index > end) nodes.push(whole.slice(end, match.index));
      const code = match[1].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      const times = match[0].length / match[1].length;
      nodes.push(report.el("span", { class: "control-character" }, times > 1 ? `U+${code} ×${times}` : `U+${code}`));
      end = match.index + match[0].length;
    }
    if (end < whole.length) nodes.push(whole.slice(end));
    return nodes;
  }

  return { Store, shown, NONE, SOLVED, MASKED, FAILED, AGENT };
})();
