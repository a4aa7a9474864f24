// Making and changing elements. Text from outside becomes text nodes only; there is no way to markup from here.

const SVG = "http://www.w3.org/2000/svg";

function made(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false)
      node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((c) => c !== null));
  return node;
}

/** An HTML element; children are nodes or text. */
export const el = (tag, attributes, ...children) => made(document.createElement(tag), attributes, children);

/** An SVG element. */
export const svg = (tag, attributes, ...children) =>
  made(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

/** Change a text only where it differs: selections live on, and nothing is laid out anew. */
export function say(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

/** Change an attribute only where it differs; null takes it away. */
export function mark(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

export function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

/** Call `draw(width)` now and whenever the width of `host` changes, once a frame at most. */
export function onWidth(host, draw) {
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.floor(host.clientWidth);
    if (now === width || now === 0) return;
    width = now;
    requestAnimationFrame(() => draw(width));
  }).observe(host);
}

/**
 * A table that is changed in place, row by row and cell by cell.
 *
 * Roles are spelt out, since a table of the look "cards" is laid out as a list of cards on a phone, and would lose them.
 *
 * columns: [{head, cell(row) -> text or node, class?, wide?}]; a node replaces the cell's content only if its `key(row)`
 * differs from the last one, so that a button keeps its focus. With `row` (row -> text) a row's line is that of the same
 * text before; new lines are put between those that stay, which never move, since a line that moves loses the focus.
 */
export class Table {
  constructor(host, caption, columns, empty, look = null, row = (_, i) => String(i)) {
    Object.assign(this, { columns, row });
    this.body = el("tbody", { role: "rowgroup" });
    const heads = columns.map((c) =>
      el("th", { scope: "col", role: "columnheader", class: c.class ?? null }, c.head),
    );
    const head = el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...heads));
    const table = el(
      "table",
      { role: "table", class: look },
      el("caption", { class: "sr" }, caption),
      head,
      this.body,
    );
    this.scroll = el("div", { class: "scroll", role: "group", "aria-label": caption }, table);
    onWidth(this.scroll, () => this.#reach());
    this.empty = el("p", { class: "empty" }, empty);
    this.scroll.hidden = true;
    host.append(this.scroll, this.empty);
  }

  /** Show these rows; of none, say what will appear here. */
  fill(rows) {
    show(this.scroll, rows.length > 0);
    show(this.empty, rows.length === 0);
    const lines = this.body.rows;
    if (lines.length !== rows.length) requestAnimationFrame(() => this.#reach());
    const keys = rows.map(this.row);
    const stay = new Set(keys);
    for (const line of [...lines]) if (!stay.has(line.dataset.row)) line.remove();
    rows.forEach((row, i) => {
      if (lines[i]?.dataset.row !== keys[i]) this.body.insertBefore(this.#blank(keys[i]), lines[i] ?? null);
      this.columns.forEach((column, j) => this.#cell(lines[i].cells[j], column, row));
    });
    while (lines.length > rows.length) this.body.deleteRow(-1);
  }

  /** Focus the button of a row, if it has one. */
  focus(key) {
    [...this.body.rows].find((line) => line.dataset.row === key)?.querySelector("button")?.focus();
  }

  /** Who has only a keyboard scrolls what they can focus: only where there is something to scroll. */
  #reach() {
    const { scroll } = this;
    const more = scroll.scrollWidth > scroll.clientWidth + 1 || scroll.scrollHeight > scroll.clientHeight + 1;
    mark(scroll, "tabindex", more ? "0" : null);
  }

  #blank(key) {
    const cells = this.columns.map((c, j) => {
      const shared = { class: c.class ?? null, "data-head": c.head };
      return j === 0
        ? el("th", { scope: "row", role: "rowheader", ...shared })
        : el("td", { role: "cell", ...shared });
    });
    return el("tr", { role: "row", "data-row": key }, ...cells);
  }

  #cell(cell, column, row) {
    if (!column.key) return say(cell, column.cell(row));
    const key = column.key(row);
    if (cell.dataset.key === key) return undefined;
    cell.dataset.key = key;
    const content = column.cell(row);
    const focused = cell.contains(document.activeElement);
    cell.replaceChildren(...(Array.isArray(content) ? content : [content]));
    if (focused) this.#focus(cell);
    return undefined;
  }

  /** What had the focus is gone: the new button has it, or the cell itself. */
  #focus(cell) {
    cell.tabIndex = -1;
    (cell.querySelector("button") ?? cell).focus();
  }
}
