"use strict";
// Highlights values: pointing at a box, focusing it or pressing it shows who makes it and who uses
// it. Everything is in the document already; nothing is fetched and no markup is made here.
(() => {
  const marks = ["chosen", "from", "to", "before", "after", "same"];

  const links = (graph) => {
    const makers = new Map();
    const users = new Map();
    const edges = [...graph.querySelectorAll(".edge")];
    const put = (map, key, value) => map.set(key, [...(map.get(key) || []), value]);
    for (const e of edges) {
      put(users, e.dataset.from, e.dataset.to);
      put(makers, e.dataset.to, e.dataset.from);
    }
    return { makers, users, edges };
  };

  /** Everything that can be reached from a box, itself left out. */
  const reach = (map, start) => {
    const found = new Set();
    const left = [start];
    while (left.length) {
      for (const next of map.get(left.pop()) || []) {
        if (!found.has(next)) {
          found.add(next);
          left.push(next);
        }
      }
    }
    return found;
  };

  const wire = (graph) => {
    const { makers, users, edges } = links(graph);
    const nodes = [...graph.querySelectorAll(".node")];
    const byId = new Map(nodes.map((n) => [n.id, n]));
    const stage = graph.closest(".stage");
    let pinned = null;

    const clear = () => {
      graph.classList.remove("active");
      for (const e of [...nodes, ...edges]) e.classList.remove(...marks);
      for (const e of document.querySelectorAll(".same")) e.classList.remove("same");
    };

    const note = (id) => {
      if (!stage) return;
      const chosen = id && document.getElementById(`${id}-note`);
      for (const n of stage.querySelectorAll(".note")) n.hidden = n !== chosen;
      const hint = stage.querySelector(".hint");
      if (hint) hint.hidden = Boolean(chosen);
    };

    const show = (id) => {
      clear();
      note(id);
      if (!id) return;
      const before = reach(makers, id);
      const after = reach(users, id);
      graph.classList.add("active");
      for (const n of nodes) {
        n.classList.toggle("chosen", n.id === id);
        n.classList.toggle("before", before.has(n.id));
        n.classList.toggle("after", after.has(n.id));
        n.classList.toggle("from", (makers.get(id) || []).includes(n.id));
        n.classList.toggle("to", (users.get(id) || []).includes(n.id));
      }
      for (const e of edges) {
        const { from, to } = e.dataset;
        e.classList.toggle("from", to === id);
        e.classList.toggle("to", from === id);
        e.classList.toggle("before", before.has(to));
        e.classList.toggle("after", after.has(from));
      }
      const tensor = byId.get(id).dataset.tensor;
      if (tensor === undefined) return;
      for (const e of document.querySelectorAll(`[data-tensor="${tensor}"]`)) {
        e.classList.add("same");
      }
    };

    const pin = (id) => {
      pinned = id;
      for (const n of nodes) {
        if (n.getAttribute("role") === "button") {
          n.setAttribute("aria-pressed", String(n.id === id));
        }
      }
      show(id);
    };

    /** One box of a drawing is in the tab order: the one that was focused last. */
    const focus = (node) => {
      for (const n of nodes) n.setAttribute("tabindex", n === node ? "0" : "-1");
      node.focus();
      node.scrollIntoView({ block: "nearest", inline: "nearest" });
    };

    const keys = {
      ArrowUp: (id) => (makers.get(id) || [])[0],
      ArrowDown: (id) => (users.get(id) || [])[0],
      ArrowLeft: (id) => (nodes[nodes.indexOf(byId.get(id)) - 1] || {}).id,
      ArrowRight: (id) => (nodes[nodes.indexOf(byId.get(id)) + 1] || {}).id,
    };

    for (const n of nodes) {
      n.addEventListener("pointerenter", () => pinned || show(n.id));
      n.addEventListener("pointerleave", () => pinned || show(null));
      n.addEventListener("focus", () => pinned || show(n.id));
      n.addEventListener("blur", () => pinned || show(null));
      n.addEventListener("click", (event) => {
        event.stopPropagation();
        if (!n.hasAttribute("href")) pin(pinned === n.id ? null : n.id);
      });
      n.addEventListener("keydown", (event) => {
        const press = event.key === "Enter" || event.key === " ";
        const next = keys[event.key] && keys[event.key](n.id);
        if (press && !n.hasAttribute("href")) pin(pinned === n.id ? null : n.id);
        else if (event.key === "Escape") pin(null);
        else if (next) {
          if (pinned) pin(next);
          focus(byId.get(next));
        } else return;
        event.preventDefault();
      });
    }
    graph.addEventListener("click", () => pin(null));
    pin(null);
    if (nodes.length) nodes[0].setAttribute("tabindex", "0");
    for (const b of stage ? stage.querySelectorAll("[data-go]") : []) {
      b.addEventListener("click", () => {
        pin(b.dataset.go);
        focus(byId.get(b.dataset.go));
      });
    }
  };

  for (const graph of document.querySelectorAll("svg.graph")) wire(graph);
})();
