// Samples of a page, as `samples`: numbers of all of them at once, texts and tokens of a file once they are needed.
"use strict";

const samples = (() => {
  const NONE = -1;
  const SOLVED = 1;
  const MASKED = 2;
  const FAILED = 4;
  const AGENT = 8;
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

  class Store {
    constructor(columns) {
      Object.assign(this, columns);
      this.opened = new Map(); // name: promise of a file's texts or tokens
    }

    /** Texts or tokens ("texts", "tokens") of a file, by its number. */
    async read(kind, file) {
      const name = `${kind}_${this.files[file]}`;
      if (!this.opened.has(name)) this.opened.set(name, report.load(name, false));
      return this.opened.get(name);
    }

    /** Number of the file that has a row. */
    fileOf(row) {
      return this.first.findLastIndex((first) => first <= row);
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
      const file = this.fileOf(row);
      const texts = await this.read("texts", file);
      const at = row - this.first[file];
      const [prompt, messages, truth, ability] = texts.prompts[texts.prompt[at]];
      return {
        row,
        response: texts.response[at],
        agent: parsed(texts.agent[at]),
        prompt,
        messages: parsed(messages),
        truth,
        ability,
        answer: null,
        error: "",
        masked: "",
        parts: [],
        notes: [],
        ...texts.detail[at],
      };
    }

    /** Figures of a sample's tokens by name; null if the page has none. */
    async tokensOf(row) {
      const size = this.figures[row];
      if (!size) return null;
      const file = this.fileOf(row);
      const columns = await this.read("tokens", file);
      const begin = this.figures.subarray(this.first[file], row).reduce((sum, other) => sum + other, 0);
      const cut = (name) => columns[name].subarray(begin, begin + size);
      const codes = Array.from(cut("code"));
      const figures = { size, version: Array.from(cut("version")) };
      for (const name of ["logprob", "difference", "entropy", "advantage", "teacher", "divergence"]) {
        figures[name] = Float32Array.from(cut(name), (bits) => HALVES[bits]);
      }
      return { ...figures, ids: codes.map((code) => columns.ids[code]), texts: codes.map((code) => columns.texts[code]) };
    }

    /** Rows of the same prompt, in any run and at any step, in the same set. */
    ofPrompt(row) {
      const id = this.promptId(row);
      const same = this.prompt_ids.map((other) => other === id);
      const rows = [];
      for (let other = 0; other < this.rows; other++) {
        if (same[this.prompt[other]] && this.set[other] === this.set[row]) rows.push(other);
      }
      return rows;
    }

    /**
     * Marks rows whose prompt, response, agent's trace or prompt id has the pattern: hits, Uint8Array [rows]. Calls
     * `went(share)` with the share that is searched, newest samples first; ends early once `went` gives false.
     */
    async search(pattern, hits, went) {
      const has = (text) => {
        pattern.lastIndex = 0;
        return pattern.test(text);
      };
      const ids = this.prompt_ids.map(has);
      for (let file = this.files.length - 1; file >= 0; file--) {
        const texts = await this.read("texts", file);
        const prompts = texts.prompts.map(([prompt]) => has(prompt));
        texts.response.forEach((response, at) => {
          const row = this.first[file] + at;
          hits[row] = ids[this.prompt[row]] || prompts[texts.prompt[at]] || has(response) || has(texts.agent[at]);
        });
        if (!went((this.files.length - file) / this.files.length)) return;
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
