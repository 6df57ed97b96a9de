// Keeps the page as it is on the server: asks for it anew, and changes what differs, so that focus, scroll position and what
// is being typed stay. Without it everything works by links and buttons. No string becomes markup here: the browser parses
// what the server sends, and refuses anything else (see the Content-Security-Policy).
"use strict";
(() => {
  const root = document.documentElement;
  const refresh = Number(document.body.dataset.refresh) * 1000;
  if (!refresh) return;
  root.classList.add("scripted");

  // --- the server's clock --------------------------------------------------------------------------------------------
  let ahead = 0; // of this machine's, in milliseconds
  let arrived = performance.now();
  const now = () => Date.now() + ahead;
  const setClock = (body) => {
    ahead = Number(body.dataset.now) * 1000 - Date.now();
    arrived = performance.now();
  };

  // As words.span in Python.
  const span = (seconds) => {
    const whole = Math.max(0, Math.floor(seconds));
    for (const [size, unit, finer, finerUnit, until] of [[86400, "d", 3600, "h", 8], [3600, "h", 60, "min", 10]]) {
      if (whole >= size) {
        const count = Math.floor(whole / size);
        const more = Math.floor((whole % size) / finer);
        return more && count < until ? `${count} ${unit} ${more} ${finerUnit}` : `${count} ${unit}`;
      }
    }
    const minutes = Math.floor(whole / 60), rest = whole % 60;
    if (!minutes) return `${whole} s`;
    return rest && minutes < 10 ? `${minutes} min ${rest} s` : `${minutes} min`;
  };
  const write = (element, words) => {
    if (element.textContent !== words) element.textContent = words;
  };
  const tick = () => {
    const at = now();
    for (const time of document.querySelectorAll("time[data-rel]")) {
      const seconds = (Date.parse(time.dateTime) - at) / 1000;
      write(time, seconds > 0 ? `in ${span(seconds)}` : `${span(-seconds)} ago`);
    }
    for (const time of document.querySelectorAll("time[data-left]")) {
      const seconds = (Date.parse(time.dateTime) - at) / 1000;
      write(time, seconds > 0 ? `${span(seconds)} left` : `ran out ${span(-seconds)} ago`);
    }
    for (const gauge of document.querySelectorAll("svg[data-until]")) {
      const part = Math.min(1, Math.max(0, (gauge.dataset.until - at / 1000) / gauge.dataset.whole));
      gauge.querySelector(".fill").setAttribute("width", `${(100 * part).toFixed(1)}%`);
      gauge.classList.toggle("low", part < 0.25);
    }
    const age = document.querySelector("[data-age]");
    if (age) write(age, `, ${span(Number(age.dataset.age) + (performance.now() - arrived) / 1000)} old`);
  };

  // --- what differs --------------------------------------------------------------------------------------------------
  const keyOf = (node) => (node.nodeType === 1 ? node.id || node.getAttribute("data-key") : null);
  const attributes = (old, fresh) => {
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
  };
  const become = (old, fresh) => {
    if (old.isEqualNode(fresh)) return;
    if (old.nodeType === 3) {
      if (old.data !== fresh.data) old.data = fresh.data;
      return;
    }
    if (old.nodeType !== 1 || old.hasAttribute("data-keep")) return;
    const typing = old === document.activeElement && old.matches("input, select");
    if (typing) return;
    attributes(old, fresh);
    if (old.matches("input") && old.value !== fresh.value) old.value = fresh.value;
    children(old, fresh);
    if (old.matches("select") && old.value !== fresh.value) old.value = fresh.value;
  };
  const children = (old, fresh) => {
    const keyed = new Map();
    for (const node of old.childNodes) {
      const key = keyOf(node);
      if (key) keyed.set(key, node);
    }
    let at = old.firstChild;
    for (const wanted of [...fresh.childNodes]) {
      const key = keyOf(wanted);
      let match = null;
      if (key) {
        match = keyed.get(key) || null;
        if (match && match.nodeName !== wanted.nodeName) match = null;
      } else if (at && !keyOf(at) && at.nodeName === wanted.nodeName) {
        match = at;
      }
      if (!match) {
        old.insertBefore(document.importNode(wanted, true), at);
        continue;
      }
      if (match === at) at = at.nextSibling;
      else old.insertBefore(match, at);
      become(match, wanted);
      keyed.delete(key);
    }
    while (at) {
      const next = at.nextSibling;
      if (at.nodeType !== 1 || !at.contains(document.activeElement) || at.nodeName !== "INPUT") at.remove();
      at = next;
    }
  };

  // --- asking --------------------------------------------------------------------------------------------------------
  let timer = 0, failures = 0, asking = null, paused = false, attention = Number(document.body.dataset.attention);
  const say = (words) => {
    const notices = document.getElementById("notices");
    let line = document.getElementById("said");
    if (!words) {
      if (line) line.remove();
      return;
    }
    if (!line) {
      line = document.createElement("div");
      line.id = "said";
      line.className = "notice";
      notices.append(line);
    }
    write(line, words);
  };
  const later = () => {
    clearTimeout(timer);
    if (!paused) timer = setTimeout(ask, Math.min(30000, refresh * 2 ** Math.min(failures, 3)));
  };
  const stale = () => {
    const pulse = document.getElementById("pulse");
    pulse.classList.add("stale");
    write(pulse.querySelector("[data-state]"), "Not connected");
  };
  const failed = () => {
    failures += 1;
    stale();
    if (failures > 1) say("The operator does not answer. What you see is what was known when it last did.");
    later();
  };
  const ask = () => {
    clearTimeout(timer);
    if (document.hidden) return;
    if (asking) asking.abort();
    const request = (asking = new XMLHttpRequest());
    request.open("GET", location.pathname + location.search);
    request.responseType = "document";
    request.timeout = 20000;
    request.onload = () => {
      asking = null;
      const fresh = request.response;
      if (!fresh || request.status === 503 || !fresh.body.dataset.now) return failed();
      failures = 0;
      setClock(fresh.body);
      document.title = fresh.title;
      const focused = document.activeElement;
      for (const id of ["notices", "main", "pulse"]) {
        become(document.getElementById(id), fresh.getElementById(id));
      }
      const header = document.querySelector("header nav"), footer = document.querySelector("footer");
      become(header, fresh.querySelector("header nav"));
      become(footer, fresh.querySelector("footer"));
      // A row that has moved has lost the focus by that; where it is gone, the next Tab begins in what is shown.
      if (focused !== document.activeElement) {
        (focused.isConnected ? focused : document.getElementById("main")).focus({ preventScroll: true });
      }
      const count = Number(fresh.body.dataset.attention);
      const spoken = document.getElementById("spoken");
      if (count !== attention) write(spoken, `${count} ${count === 1 ? "job needs" : "jobs need"} attention`);
      attention = count;
      tick();
      later();
    };
    request.onerror = request.ontimeout = () => {
      asking = null;
      failed();
    };
    request.send();
  };

  // --- what a person does ----------------------------------------------------------------------------------------------
  const spoken = document.createElement("p");
  spoken.id = "spoken";
  spoken.className = "hidden";
  spoken.setAttribute("role", "status");
  document.body.append(spoken);

  const pause = document.getElementById("pause");
  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    if (paused) clearTimeout(timer);
    else ask();
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && !paused) ask();
  });

  // Filters act as they are changed; the address says what is shown, so that it can be shared.
  let typed = 0;
  const filtered = (form) => {
    const query = new URLSearchParams();
    for (const [name, value] of new FormData(form)) {
      if (value && !(name === "window" && value === "6h")) query.append(name, value);
    }
    const words = query.toString();
    history.replaceState(null, "", location.pathname + (words ? `?${words}` : ""));
    ask();
  };
  document.addEventListener("input", (event) => {
    const form = event.target.closest("form[role=search]");
    if (!form) return;
    clearTimeout(typed);
    typed = setTimeout(() => filtered(form), event.target.matches("select") ? 0 : 250);
  });
  document.addEventListener("submit", (event) => {
    if (!event.target.matches("form[role=search]")) return;
    event.preventDefault();
    clearTimeout(typed);
    filtered(event.target);
  });

  // Arrows go from row to row once the focus is in a table's first link.
  document.addEventListener("keydown", (event) => {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    let row = event.target.closest("tbody tr");
    if (!row || !event.target.matches("a")) return;
    do row = row[step];
    while (row && !row.querySelector("a.name"));
    const link = row && row.querySelector("a.name");
    if (!link) return;
    event.preventDefault();
    link.focus();
  });

  setClock(document.body);
  tick();
  setInterval(tick, 1000);
  later();
})();
