"use strict"
// Updates what bokeh has drawn: labels that fit, filters, switches, light and dark. chart.py and tracks.py define the
// names of models and columns.

const timeline = (() => {
  const SMALLEST = 12 // pixels between two numbers of steps
  const APART = 14 // average pixels per slowest request
  let doc, facts

  const model = (name) => doc.get_model_by_name(name)
  const columns = (name) => ({ ...model(name).data, ...facts.words[name] })
  const time = (s) => (s >= 9.995 ? s.toFixed(1) : s >= 0.0995 ? s.toFixed(2) : s.toFixed(3)) + " s"
  const at = (s) => s.toFixed(s < 10000 ? 2 : 1) + " s"

  // --- tooltips --------------------------------------------------------------------------------------------

  function task(d, i) {
    const part = d.parts[i] > 1 ? "." + (d.part[i] + 1) : ""
    return facts.stages[d.stage[i]] + "[" + d.step[i] + part + "]"
  }

  function lines(pairs) {
    return pairs.filter(([, value]) => value !== "" && value !== null && !Number.isNaN(value))
      .map(([name, value]) => name + "\t" + value).join("\n")
  }

  const run = (d, i) => (facts.runs.length > 1 && d.run ? facts.runs[d.run[i]] + ": " : "")

  // Source -> headline and facts of a row.
  const spent = (d, i) => [["took", time(d.end[i] - d.begin[i])], ["began", at(d.begin[i])]]
  const telling = {
    spans: [(d, i) => task(d, i), (d, i) => lines([
      ...spent(d, i), ["ended", at(d.end[i])], ["weights version", d.version[i]], ["staleness", d.stale[i]],
      ["samples", d.samples[i]], ["waited for", d.waited[i]],
    ]) + (d.more[i] ? "\n" + d.more[i] : "")],
    waits: [(d, i) => d.pool[i] + " waits for " + d.cause[i], (d, i) => lines([
      ...spent(d, i), ["came last", d.who[i]], ["then ran", d.task[i]],
    ])],
    requests: [(d, i) => "slowest request: " + d.who[i], (d, i) => lines([
      ...spent(d, i), ["ended", at(d.end[i])], ["led to", d.task[i]],
      ["which began", d.task[i] ? at(d.to_x[i]) : ""],
      ["GPUs waited", d.idle[i] > 0 ? time(d.idle[i]) : "not at all"],
      ["click", textOf(d, i) ? "opens its text" : ""],
    ])],
    downtimes: [(d, i) => d.words[i], (d, i) => lines([["after", at(d.at[i])], ["why", d.why[i]]])],
    band: [(d, i) => d.count[i] + " reward requests in flight", (d, i, most) =>
      lines([["at", at(d.begin[i])], ["at most", most]])],
  }

  function tell(source, what, i) {
    const [head, said] = telling[source.name] ?? telling.band
    const d = { ...source.data, ...facts.words[source.name] }
    return what === "head" ? run(d, i) + head(d, i) : said(d, i, source.tags[0])
  }

  // The address of a group's text; "" if there is none.
  function textOf(d, i) {
    const page = facts.samples[d.run[i]]
    return page && d.group[i] >= 0 ? page + "#step-" + d.step[i] + "-group-" + d.group[i] : ""
  }

  function read(source) {
    const [i] = source.inspected.indices
    const address = i === undefined ? "" : textOf(source.data, i)
    if (address) open(address, "samples")
  }

  // --- what is pointed at ---------------------------------------------------------------------------------

  const pointed = {} // renderer -> the request rows that its bars under the pointer belong to
  let ledTo = null // run and task -> request rows that led to it

  // Shows the arrows of the requests under the pointer, and of those that led to the bar there.
  function point(renderer, index) {
    const name = renderer.name, found = []
    if (name === "request") found.push(...index.indices)
    else if (name === "span" || name === "wait") {
      const d = columns(name + "s")
      for (const i of index.indices) {
        const to = name === "span" ? task(d, i) : d.task[i]
        found.push(...(ledTo.get(d.run[i] + to) ?? []))
      }
    } else return
    if (!found.length && !(pointed[name] ?? []).length) return
    pointed[name] = found
    leads()
  }

  function leads() {
    const every = model("shown").active.includes(5)
    const kept = every ? shownRequests : [...new Set(Object.values(pointed).flat())].sort((a, b) => a - b)
    const before = model("leads-shown").indices ?? []
    if (before.length !== kept.length || kept.some((i, at) => before[at] !== i)) model("leads-shown").indices = kept
  }

  // --- labels -----------------------------------------------------------------------------------------------

  let chosen = null // per span, 1 if it passes the filters; null for all
  let passed = {} // source -> rows that pass the filters
  let drawn = [0, Infinity] // seconds in which bars are drawn
  const dense = { spans: false, steps: false } // too many to distinguish at this zoom
  let waiting = false
  let shownRequests = [] // rows of the requests that are drawn
  let onPath = null // names of the tasks on the critical path, while it is shown

  // Digits are twice as wide as a point.
  const width = (word) => 6.2 * word.length - 3 * (word.includes(".") ? 1 : 0)

  // Before bokeh draws the next frame, so that a zoom draws everything once.
  function relabel() {
    if (waiting) return
    waiting = true
    queueMicrotask(() => { waiting = false; label() })
  }

  function label() {
    const range = model("seconds-range"), wide = model("chart").inner_width
    if (!(wide > 0)) return
    const scale = wide / (range.end - range.start), d = columns("spans")
    cull(range, d)
    const x = [], y = [], text = [], ink = []
    let seen = 0
    for (let i = 0; i < d.begin.length; i++) {
      if (chosen && !chosen[i]) continue
      const from = Math.max(d.begin[i], range.start), to = Math.min(d.end[i], range.end)
      const room = (to - from) * scale
      if (room >= 0) seen++
      if (room < 10 || d.bottom[i] - d.top[i] < 11) continue
      const word = d.parts[i] > 1 ? d.step[i] + "." + (d.part[i] + 1) : "" + d.step[i]
      if (room < width(word) + 3) continue
      x.push((from + to) / 2)
      y.push((d.top[i] + d.bottom[i]) / 2)
      text.push(word)
      // Bars off the critical path are pale while it is shown.
      ink.push(onPath && !onPath.has(d.run[i] + task(d, i)) ? "#888888" : facts.ink[d.stage[i]])
    }
    model("labels").data = { x, y, text, ink }
    number(range, scale)
    gaps(range, scale)
    cuts(scale)
    thin(range, wide)
    // Bars a pixel wide consist of their edge, which would hide the fill.
    const crowded = seen > wide
    if (crowded !== dense.spans) {
      dense.spans = crowded
      theme()
    }
  }

  // Leaves out bars far from the visible range, as bokeh would draw them, too. Nearby ones are kept, so that not each
  // move changes what is drawn.
  function cull(range, d) {
    const wide = range.end - range.start, [from, to] = drawn
    if (range.start >= from && range.end <= to && to - from <= 8 * wide) return
    drawn = [range.start - 1.5 * wide, range.end + 1.5 * wide]
    const all = drawn[0] <= 0 && drawn[1] >= facts.longest, shown = passed.spans
    const near = (i) => d.end[i] >= drawn[0] && d.begin[i] <= drawn[1]
    model("spans-shown").indices = all ? shown ?? null : (shown ?? [...d.begin.keys()]).filter(near)
  }

  function thin(range, wide) {
    const steps = columns("steps").at
    const ends = (passed.steps ?? [...steps.keys()]).filter((i) => steps[i] >= range.start && steps[i] <= range.end)
    const crowded = ends.length * SMALLEST / 2 > wide * facts.runs.length
    if (crowded !== dense.steps) {
      dense.steps = crowded
      switched()
    }
    // If there is no room for all requests, keep those for which the GPUs waited longest.
    const d = columns("requests")
    let kept = (passed.requests ?? [...d.begin.keys()]).filter((i) => d.to_x[i] >= range.start && d.begin[i] <= range.end)
    const most = Math.floor(wide * facts.runs.length / APART)
    if (kept.length > most) {
      kept.sort((a, b) => d.idle[b] - d.idle[a] || (d.end[b] - d.begin[b]) - (d.end[a] - d.begin[a]) || a - b)
      kept = kept.slice(0, most).sort((a, b) => a - b)
    }
    shownRequests = kept
    leads()
    const before = model("requests-shown").indices
    if (!before || before.length !== kept.length || kept.some((i, at) => before[at] !== i)) {
      model("requests-shown").indices = kept
    }
  }

  function number(range, scale) {
    const d = columns("steps"), x = [], y = [], text = []
    const last = {} // run -> pixels of the number before, or of the chart's left end
    for (const i of passed.steps ?? d.at.keys()) {
      if (d.at[i] > range.end) continue
      const at = d.at[i] * scale, before = last[d.run[i]] ?? range.start * scale
      const long = "step " + d.step[i], short = "" + d.step[i]
      const word = at - before > 6.6 * long.length + SMALLEST ? long : short
      if (at - before < 6.6 * word.length + SMALLEST / 2) continue
      last[d.run[i]] = at
      x.push(d.at[i])
      y.push(d.y[i])
      text.push(word)
    }
    model("numbers").data = { x, y, text }
  }

  // Names the cause of each gap that has room for it.
  function gaps(range, scale) {
    const d = columns("waits"), x = [], y = [], text = []
    const off = !model("shown").active.includes(0)
    for (const i of off ? [] : passed.waits ?? d.begin.keys()) {
      const from = Math.max(d.begin[i], range.start), to = Math.min(d.end[i], range.end)
      const room = (to - from) * scale
      if (room < 24 || d.bottom[i] - d.top[i] < 11) continue
      const long = facts.causes[d.cause_index[i]] + " " + time(d.end[i] - d.begin[i])
      const word = [long, facts.causes[d.cause_index[i]]].find((w) => 6 * w.length + 6 < room)
      if (!word) continue
      x.push((from + to) / 2)
      y.push((d.top[i] + d.bottom[i]) / 2)
      text.push(word)
    }
    model("gaps").data = { x, y, text }
  }

  function cuts(scale) {
    const d = columns("downtimes"), x = [], y = [], text = []
    const last = {} // run -> pixels of the end of the words before
    for (let i = 0; i < d.at.length; i++) {
      const at = d.at[i] * scale, before = last[d.run[i]] ?? -Infinity
      if (at < before) continue
      const word = at + 6.6 * d.words[i].length < (d.at[i + 1] ?? Infinity) * scale ? d.words[i] : d.length[i]
      last[d.run[i]] = at + 6.6 * word.length + SMALLEST
      x.push(d.at[i])
      y.push(d.y[i])
      text.push(word)
    }
    model("cuts").data = { x, y, text }
  }

  // --- filters and switches ---------------------------------------------------------------------------------

  function passing(name, steps, stages) {
    const d = columns(name), found = []
    for (let i = 0; i < d.step.length; i++) {
      if (d.step[i] >= steps[0] && d.step[i] <= steps[1] && (!d.stage || stages[d.stage[i]])) found.push(i)
    }
    return found
  }

  function filter() {
    const slider = doc.get_model_by_name("steps-range")
    const steps = slider ? slider.value : [-Infinity, Infinity]
    const stages = facts.stages.map(() => false)
    for (const i of model("stages").active) stages[i] = true
    for (const name of ["spans", "path", "waits", "requests", "steps"]) {
      const found = passed[name] = passing(name, steps, stages)
      if (name !== "spans") model(name + "-shown").indices = found
      else {
        chosen = new Uint8Array(columns("spans").step.length)
        for (const i of found) chosen[i] = 1
        drawn = [0, -1] // so that cull chooses again
      }
    }
    relabel()
  }

  function fit() {
    // Zoom to the chosen steps, which would be too narrow in a long run.
    const d = columns("spans")
    let from = Infinity, to = -Infinity
    for (let i = 0; i < d.begin.length; i++) {
      if (!chosen[i]) continue
      from = Math.min(from, d.begin[i])
      to = Math.max(to, d.end[i])
    }
    const slider = model("steps-range")
    const all = slider.value[0] <= slider.start && slider.value[1] >= slider.end
    if (all) show(0, facts.longest)
    else if (to > from) show(from - 0.01 * (to - from), to + 0.01 * (to - from))
  }

  function show(from, to) {
    model("seconds-range").setv({ start: Math.max(0, from), end: Math.min(facts.longest, to) })
  }

  function switched() {
    const on = new Set(model("shown").active)
    const set = (names, visible) => { for (const name of names) model(name).visible = visible }
    set(["wait"], on.has(0))
    for (let b = 0; b < facts.bands; b++) set(["band-" + b, "band-spot-" + b], on.has(1))
    set(["request", "lead", "arrow"], on.has(2))
    leads()
    set(["step"], on.has(3) && !dense.steps)
    set(["number"], on.has(3))
    set(["path-span", "path-link"], on.has(4))
    const path = columns("path")
    onPath = on.has(4) ? new Set(Array.from(path.task, (name, i) => path.run[i] + name)) : null
    // Fade bars off the path.
    model("span-glyph").setv({ fill_alpha: on.has(4) ? 0.25 : 1, line_alpha: on.has(4) ? 0.25 : 1 })
    relabel()
  }

  const dark = matchMedia("(prefers-color-scheme: dark)")

  function theme() {
    for (const [name, property, light, darker] of facts.themed) model(name)[property] = dark.matches ? darker : light
    if (dense.spans) model("edges").palette = model("fills").palette
  }

  // --- keyboard ---------------------------------------------------------------------------------------------

  let pointer = null // pixels from the left of the screen, while the pointer is over the chart

  // The share of the visible time left of the pointer; a half if it is elsewhere.
  function focus() {
    if (pointer === null) return 0.5
    const view = Bokeh.index.find_one_by_id(model("chart").id)
    const left = view.el.getBoundingClientRect().left + view.frame.bbox.left
    return Math.min(1, Math.max(0, (pointer - left) / view.frame.bbox.width))
  }

  function zoom(factor) {
    const range = model("seconds-range"), wide = range.end - range.start, at = range.start + focus() * wide
    const next = Math.min(facts.longest, Math.max(1e-4, wide * factor))
    move(at - (at - range.start) * next / wide, next)
  }

  function pan(share) {
    const range = model("seconds-range"), wide = range.end - range.start
    move(range.start + share * wide, wide)
  }

  function move(from, wide) {
    const start = Math.max(0, Math.min(from, facts.longest - wide))
    show(start, start + wide)
  }

  const KEYS = {
    w: () => zoom(0.75), s: () => zoom(1 / 0.75), a: () => pan(-0.15), d: () => pan(0.15),
    arrowleft: () => pan(-0.15), arrowright: () => pan(0.15), 0: () => show(0, facts.longest), "?": () => help(),
  }

  function help() {
    const dialog = document.getElementById("keys")
    if (dialog.open) dialog.close()
    else dialog.showModal()
  }

  function press(event) {
    const act = KEYS[event.key.toLowerCase()], on = event.composedPath()[0]
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return
    // Arrows move a slider that has the focus; an open dialog has its own keys.
    if (on.getAttribute?.("role") === "slider" && event.key.startsWith("Arrow")) return
    if (document.getElementById("keys").open && event.key !== "?") return
    event.preventDefault()
    act()
  }

  // Says which switches are on, to those who hear the page.
  function aloud() {
    for (const name of ["stages", "shown"]) {
      const view = Bokeh.index.find_one_by_id(model(name).id), on = model(name).active
      view?.shadow_el.querySelectorAll("button").forEach((b, i) => b.setAttribute("aria-pressed", on.includes(i)))
    }
  }

  // --- start ------------------------------------------------------------------------------------------------

  async function start(item, given) {
    facts = given
    ledTo = new Map()
    dense.spans = facts.crowded
    await Bokeh.embed.embed_item(item, "timeline")
    doc = Bokeh.documents[Bokeh.documents.length - 1]
    const asked = columns("requests")
    for (let i = 0; i < asked.task.length; i++) {
      const to = asked.run[i] + asked.task[i]
      ledTo.set(to, [...(ledTo.get(to) ?? []), i])
    }
    if (dark.matches) theme()
    dark.addEventListener("change", theme)
    const changed = (name, property, act) => model(name).properties[property].change.connect(act)
    changed("stages", "active", filter)
    changed("shown", "active", switched)
    if (doc.get_model_by_name("steps-range")) changed("steps-range", "value", () => { filter(); fit() })
    for (const end of ["start", "end"]) changed("seconds-range", end, relabel)
    changed("chart", "inner_width", relabel)
    for (const name of ["stages", "shown"]) changed(name, "active", aloud)
    aloud()
    addEventListener("keydown", press)
    const place = document.getElementById("timeline")
    quietFocus(place)
    place.addEventListener("pointermove", (event) => { pointer = event.clientX })
    place.addEventListener("pointerleave", () => { pointer = null })
    document.getElementById("help").addEventListener("click", help)
    for (const button of document.querySelectorAll("button.go")) {
      button.addEventListener("click", () => {
        const from = Number(button.dataset.from), to = Number(button.dataset.to), around = Math.max(to - from, 0.05)
        show(from - 2 * around, to + 2 * around)
        document.getElementById("timeline").scrollIntoView({ block: "nearest" })
      })
    }
    label()
    model("span").visible = true
    switched()
    document.documentElement.dataset.ready = "yes"
  }

  return { start, tell, read, point, columns, model: (name) => model(name) }
})()
