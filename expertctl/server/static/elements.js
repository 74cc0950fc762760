/** Elements made by hand: whatever comes from the server is text, never markup. */

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element with attributes and children. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** An SVG element with attributes and children. */
export function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

/** The element of the page with this id. */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no #${id}`);
  return found;
}

/** Set a text, unless it is there already: what did not change is not read out again. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A name, a number and what stands below it; `show` sets both. */
export function tile(name) {
  const [big, small] = [element("strong"), element("small")];
  const node = element("div", { class: "tile" }, element("dt", {}, name), element("dd", {}, big, small));
  const show = (number, below) => {
    say(big, number);
    say(small, below);
  };
  return { node, show };
}

/** Fill a table, changing only what is not there already. */
export function fill(table, rows) {
  const [body] = table.tBodies;
  while (body.rows.length > rows.length) body.deleteRow(-1);
  while (body.rows.length < rows.length) body.append(emptyRow(rows[0].length));
  rows.forEach((cells, place) => {
    cells.forEach((text, column) => say(body.rows[place].cells[column], text));
  });
}

/** Fill a list of names and values; there are always as many. */
export function pairs(list, values) {
  if (list.children.length === 0)
    list.append(...values.map(([name]) => element("div", {}, element("dt", {}, name), element("dd"))));
  values.forEach(([, value], place) => say(list.children[place].lastChild, value));
}

function emptyRow(columns) {
  const cells = Array.from({ length: columns - 1 }, () => element("td"));
  return element("tr", {}, element("th", { scope: "row" }), ...cells);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}
