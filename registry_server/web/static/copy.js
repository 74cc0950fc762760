"use strict";

// Adds a button to every command that copies it. Without scripts, the commands can be selected.
const copied = document.createElement("p");
copied.className = "label";
copied.setAttribute("role", "status");

/** Copy a text, also where the clipboard needs a secure page and this one is not. */
async function copyText(text, element) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const range = document.createRange();
  range.selectNodeContents(element);
  const selection = window.getSelection();
  selection.removeAllRanges();
  selection.addRange(range);
  if (!document.execCommand("copy")) throw new Error("the browser refused to copy");
  selection.removeAllRanges();
}

function addButton(block) {
  const code = block.querySelector("code");
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy: " + code.textContent.slice(0, 60));
  button.addEventListener("click", async () => {
    let answer = "Copied";
    try {
      await copyText(code.textContent, code);
    } catch {
      answer = "Not copied";
    }
    button.textContent = answer;
    copied.textContent = answer;
    setTimeout(() => {
      button.textContent = "Copy";
      copied.textContent = "";
    }, 2000);
  });
  block.append(button);
}

document.querySelectorAll("[data-copy]").forEach(addButton);
document.querySelector("main").append(copied);
