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

  // --- labels -----------------------------------------------------------------------------------------------

  let chosen = null // per span, 1 if it passes the filters; null for all
  let passed = {} // source -> rows that pass the filters
  const dense = { spans: false, steps: false } // too many to distinguish at this zoom
  let waiting = false
  let onPath = null // names of the tasks on the critical path, while it is shown

  // Digits are twice as wide as a point.
  const width = (word) => 6.2 * word.length - 3 * (word.includes(".") ? 1 : 0)

  function relabel() {
    if (waiting) return
    waiting = true
    requestAnimationFrame(() => { waiting = false; label() })
  }

  function label() {
    const range = model("seconds-range"), wide = model("chart").inner_width
    if (!(wide > 0)) return
    const scale = wide / (range.end - range.start), d = columns("spans")
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
    number(scale)
    cuts(scale)
    thin(range, wide)
    // Bars a pixel wide consist of their edge, which would hide the fill.
    const crowded = seen > wide
    if (crowded !== dense.spans) {
      dense.spans = crowded
      theme()
    }
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
    const before = model("requests-shown").indices
    if (!before || before.length !== kept.length || kept.some((i, at) => before[at] !== i)) {
      model("requests-shown").indices = kept
    }
  }

  function number(scale) {
    const d = columns("steps"), x = [], y = [], text = []
    const last = {} // run -> pixels of the number before
    for (const i of passed.steps ?? d.at.keys()) {
      const at = d.at[i] * scale, before = last[d.run[i]] ?? 0
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
      model(name + "-shown").indices = found
      if (name === "spans") {
        chosen = new Uint8Array(columns("spans").step.length)
        for (const i of found) chosen[i] = 1
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

  // --- the live page ----------------------------------------------------------------------------------------

  function keep() {
    const range = model("seconds-range"), slider = doc.get_model_by_name("steps-range")
    const all = range.start <= 0 && range.end >= facts.longest
    const every = !slider || (slider.value[0] <= slider.start && slider.value[1] >= slider.end)
    const off = facts.stages.filter((_, i) => !model("stages").active.includes(i))
    sessionStorage.setItem("timeline", JSON.stringify({
      range: all ? null : [range.start, range.end], steps: every ? null : slider.value, off,
      shown: model("shown").active,
    }))
  }

  function restore() {
    const text = sessionStorage.getItem("timeline")
    if (!text) return
    const kept = JSON.parse(text), slider = doc.get_model_by_name("steps-range")
    model("shown").active = kept.shown
    model("stages").active = [...facts.stages.keys()].filter((i) => !kept.off.includes(facts.stages[i]))
    if (kept.steps && slider) slider.value = kept.steps.map((s) => Math.min(slider.end, Math.max(slider.start, s)))
    if (kept.range) show(...kept.range)
  }

  // --- start ------------------------------------------------------------------------------------------------

  async function start(item, given, live) {
    facts = given
    dense.spans = facts.crowded
    await Bokeh.embed.embed_item(item, "timeline")
    doc = Bokeh.documents[Bokeh.documents.length - 1]
    if (dark.matches) theme()
    dark.addEventListener("change", theme)
    const changed = (name, property, act) => model(name).properties[property].change.connect(act)
    changed("stages", "active", filter)
    changed("shown", "active", switched)
    if (doc.get_model_by_name("steps-range")) changed("steps-range", "value", () => { filter(); fit() })
    if (live) restore()
    for (const end of ["start", "end"]) changed("seconds-range", end, relabel)
    changed("chart", "inner_width", relabel)
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
    if (live) addEventListener("pagehide", keep)
    document.documentElement.dataset.ready = "yes"
  }

  return { start, tell, read, columns, model: (name) => model(name) }
})()
