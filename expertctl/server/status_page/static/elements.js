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

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}
