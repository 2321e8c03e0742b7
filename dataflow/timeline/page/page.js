"use strict"
// Draws the chart of the page's data, which chart.py describes, and steers it by pointer, keys and switches.

const timeline = (() => {
  const $ = (id) => document.getElementById(id)
  const data = JSON.parse($("data").textContent)
  const chart = $("chart"), overview = $("overview"), tip = $("tip")
  const LEFT = 112, RIGHT = 12, AXIS = 40 // pixels: names of rows, beside the plot, below it
  const STRIPE = 14 // pixels of a pool in the overview
  const APART = 14 // average pixels per slowest request
  const PATH = "#E0007A" // no stage has this colour
  const BAND = ["#F6D58D", "#84651C"]
  const WAITS = "exposed waits", FLIGHT = "rewards in flight", SLOW = "slowest group of a mini-batch"
  const ENDS = "step ends", CRITICAL = "critical path", ARROWS = "all arrows"
  const LAYERS = [WAITS, FLIGHT, SLOW, ENDS, CRITICAL, ARROWS]
  const OFF = [CRITICAL, ARROWS] // at first; without the last, arrows are shown of what is pointed at
  const dark = matchMedia("(prefers-color-scheme: dark)")
  const steps = data.bars.map((bar) => bar.step)
  const [first, last] = steps.reduce(([a, b], step) => [Math.min(a, step), Math.max(b, step)], [Infinity, -Infinity])

  const view = { from: 0, to: data.length } // seconds
  const chosen = { layers: new Set(), stages: new Set(), first, last }
  const seen = {} // what the last frame shows
  let pen, look, pointer = null, pointed = null, waiting = false

  // --- places -------------------------------------------------------------------------------------------

  const wide = () => chart.clientWidth - LEFT - RIGHT
  const scale = () => wide() / (view.to - view.from)
  const place = (second) => LEFT + (second - view.from) * scale()
  const second = (x) => view.from + (x - LEFT) / scale()
  const passes = (item) => (item.step === undefined || (item.step >= chosen.first && item.step <= chosen.last)
    || (chosen.first === first && chosen.last === last)) && (!item.stage || chosen.stages.has(item.stage))
  const visible = (item) => item.x[1] >= view.from && item.x[0] <= view.to && passes(item)
  const box = ({ x, y }) => [place(x[0]), y[0], Math.max(1, (x[1] - x[0]) * scale()), y[1] - y[0]]

  // --- drawing ------------------------------------------------------------------------------------------

  function sized(canvas, high) {
    const ratio = devicePixelRatio || 1
    canvas.style.height = high + "px"
    canvas.width = Math.round(canvas.clientWidth * ratio)
    canvas.height = Math.round(high * ratio)
    const made = canvas.getContext("2d")
    made.scale(ratio, ratio)
    made.font = "11px system-ui, sans-serif"
    made.textBaseline = "middle"
    return made
  }

  function theme() {
    const css = getComputedStyle(document.documentElement), at = dark.matches ? 1 : 0
    look = { at }
    for (const name of ["ink", "faint", "edge", "paper", "slow", "hatch"]) look[name] = css.getPropertyValue("--" + name)
    const tile = Object.assign(document.createElement("canvas"), { width: 7, height: 7 }), line = tile.getContext("2d")
    line.strokeStyle = look.hatch
    for (const x of [-7, 0, 7]) line.stroke(new Path2D(`M${x} 7L${x + 7} 0`))
    look.hatched = chart.getContext("2d").createPattern(tile, "repeat")
    later()
  }

  // Draws once before the next frame, however much has changed.
  function later() {
    if (waiting) return
    waiting = true
    requestAnimationFrame(() => { waiting = false; draw() })
  }

  function draw() {
    if (wide() <= 0) return
    pen = sized(chart, data.height + AXIS)
    for (const name of ["labels", "gaps", "numbers", "cuts", "arrows"]) seen[name] = []
    axis()
    names()
    pen.save()
    pen.beginPath()
    pen.rect(LEFT, 0, wide(), data.height)
    pen.clip()
    if (chosen.layers.has(FLIGHT)) data.bands.forEach(band)
    if (chosen.layers.has(ENDS)) ends()
    waits()
    bars()
    requests()
    if (chosen.layers.has(CRITICAL)) path()
    cuts()
    pen.restore()
    small()
  }

  function text(words, x, y, colour, align = "center", room = undefined) {
    pen.fillStyle = colour
    pen.textAlign = align
    pen.fillText(words, x, y, room)
  }

  function line(x, y, toX, toY, colour, dash = []) {
    pen.strokeStyle = colour
    pen.setLineDash(dash)
    pen.stroke(new Path2D(`M${x} ${y}L${toX} ${toY}`))
    pen.setLineDash([])
  }

  function axis() {
    const least = (view.to - view.from) / Math.max(1, wide() / 90), power = 10 ** Math.floor(Math.log10(least))
    const size = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least)
    const digits = Math.max(0, -Math.floor(Math.log10(size)))
    for (let at = Math.ceil(view.from / size) * size; at <= view.to; at += size) {
      line(place(at), 0, place(at), data.height + 4, look.edge)
      text(at.toFixed(digits), place(at), data.height + 13, look.faint)
    }
    line(LEFT, data.height, LEFT + wide(), data.height, look.faint)
    const cut = data.cuts.length ? "; time in which a run was not running is cut out" : ""
    text("seconds from the first task" + cut, LEFT + wide() / 2, data.height + 30, look.faint)
  }

  function names() {
    for (const { name, top, bottom } of data.rows) text(name, LEFT - 8, (top + bottom) / 2, look.ink, "right", LEFT - 12)
    pen.font = "bold 14px system-ui, sans-serif"
    for (const { name, y } of data.runs) text(name, 4, y, look.ink, "left")
    pen.font = "11px system-ui, sans-serif"
  }

  function band({ y: [top, bottom], points, most }) {
    const high = (level) => bottom - level / most * (bottom - top)
    pen.fillStyle = BAND[look.at]
    pen.beginPath()
    pen.moveTo(place(points[0][0]), bottom)
    points.forEach(([at, level], i) => {
      pen.lineTo(place(at), high(points[Math.max(0, i - 1)][1]))
      pen.lineTo(place(at), high(level))
    })
    pen.lineTo(place(points.at(-1)[0]), bottom)
    pen.fill()
    text(`at most ${most} in flight`, LEFT + 3, bottom - 6, look.ink, "left")
  }

  function ends() {
    const shown = data.ends.filter((end) => end.x >= view.from && end.x <= view.to && passes(end))
    const crowded = shown.length * 6 > wide() * data.runs.length, before = {}
    for (const { x, step, top, bottom } of shown) {
      if (!crowded) line(place(x), top, place(x), bottom, look.faint, [4, 3])
      const room = place(x) - (before[top] ?? LEFT)
      const words = ["step " + step, "" + step].find((w) => pen.measureText(w).width + 9 < room)
      if (!words) continue
      before[top] = place(x)
      text(words, place(x) - 3, top + 7, look.faint, "right")
      seen.numbers.push(words)
    }
  }

  function waits() {
    seen.waits = chosen.layers.has(WAITS) ? data.waits.filter(visible) : []
    for (const wait of seen.waits) {
      pen.fillStyle = data.causes[wait.cause][look.at]
      pen.fillRect(...box(wait))
      pen.fillStyle = look.hatched
      pen.fillRect(...box(wait))
      label(wait, [wait.words, wait.cause], look.ink, seen.gaps)
    }
  }

  // Writes the first of some words for which the visible part of a bar has room.
  function label({ x, y }, words, colour, into) {
    if (y[1] - y[0] < 11) return
    const from = Math.max(x[0], view.from), to = Math.min(x[1], view.to)
    const fits = words.find((w) => pen.measureText(w).width + 4 < (to - from) * scale())
    if (!fits) return
    text(fits, place((from + to) / 2), (y[0] + y[1]) / 2 + 0.5, colour)
    into.push(fits)
  }

  function bars() {
    seen.bars = data.bars.filter(visible)
    const onPath = chosen.layers.has(CRITICAL) ? new Set(data.path.map((bar) => bar.task)) : null
    for (const bar of seen.bars) {
      const [x, y, w, h] = box(bar), pale = onPath && !onPath.has(bar.task), colours = data.stages[bar.stage]
      pen.globalAlpha = pale ? 0.25 : 1
      pen.fillStyle = colours[look.at]
      pen.fillRect(x, y, w > 3 ? w - 1 : w, h)
      pen.globalAlpha = 1
      if (w > 8) label(bar, [bar.label], pale ? look.faint : colours[2], seen.labels)
    }
  }

  function requests() {
    const has = (layer) => chosen.layers.has(layer)
    const near = (r) => passes(r) && Math.max(r.x[1], r.to?.[0] ?? 0) >= view.from && r.x[0] <= view.to
    let kept = has(SLOW) ? data.requests.filter(near) : []
    // If there is no room for all, those for which the GPUs waited longest.
    const most = Math.floor(wide() * data.runs.length / APART)
    if (kept.length > most) {
      kept = [...kept].sort((a, b) => b.idle - a.idle || (b.x[1] - b.x[0]) - (a.x[1] - a.x[0])).slice(0, most)
    }
    seen.requests = kept
    const led = (r) => pointed && (r === pointed || (r.task !== undefined && r.task === pointed.task))
    seen.arrows = (has(ARROWS) ? kept : has(SLOW) ? data.requests.filter(led) : []).filter((r) => r.to)
    for (const { x, y, to } of seen.arrows) {
      const [toX, toY] = [place(to[0]), to[1]]
      line(place(x[1]), y[0], toX, toY, look.slow, [5, 3])
      pen.fillStyle = look.slow
      pen.fill(new Path2D(`M${toX} ${toY - 4}l4 7h-8z`))
    }
    pen.fillStyle = look.slow
    for (const { x, y } of kept) pen.fillRect(place(x[0]), y[0] - 1.5, Math.max(1, (x[1] - x[0]) * scale()), 3)
  }

  function path() {
    pen.lineWidth = 2.5
    let before = null
    for (const bar of data.path) {
      const [x, y, w, h] = box(bar), middle = y + h / 2
      if (before && before.x <= bar.x[0] + 1e-3) line(place(before.x), before.y, x, middle, PATH)
      before = { x: bar.x[1], y: middle }
      if (!visible(bar)) continue
      pen.fillStyle = data.stages[bar.stage][look.at]
      pen.fillRect(x, y, w, h)
      pen.strokeStyle = PATH
      pen.strokeRect(x, y, w, h)
    }
    pen.lineWidth = 1
  }

  function cuts() {
    for (const { x, top, bottom, words } of data.cuts) {
      pen.fillStyle = look.paper
      pen.fillRect(place(x) - 4, top, 8, bottom - top)
      for (const at of [-4, 4]) line(place(x) + at, top, place(x) + at, bottom, look.faint, [5, 2])
      text(words, place(x), top - 11, look.ink, "left")
      seen.cuts.push(words)
    }
  }

  const across = (at) => LEFT + at / data.length * wide() // in the overview

  function small() {
    const large = pen
    pen = sized(overview, STRIPE * data.stripes + 8)
    for (const bar of data.bars) {
      if (bar.stripe < 0) continue
      pen.fillStyle = data.stages[bar.stage][look.at]
      pen.fillRect(across(bar.x[0]), 4 + STRIPE * bar.stripe, Math.max(0.5, across(bar.x[1]) - across(bar.x[0])), STRIPE - 2)
    }
    const window = [across(view.from), 1, across(view.to) - across(view.from), STRIPE * data.stripes + 6]
    pen.fillStyle = "rgb(0 114 178 / .18)"
    pen.fillRect(...window)
    pen.strokeStyle = look.faint
    pen.strokeRect(...window)
    pen = large
  }

  // --- what is pointed at ---------------------------------------------------------------------------------

  function under(x, y) {
    if (x < LEFT || x > LEFT + wide()) return null
    const at = second(x), covers = (item) => item.x[0] <= at + 1 / scale() && item.x[1] >= at - 1 / scale() &&
      item.y[0] <= y && item.y[1] >= y
    return seen.requests.find((r) => Math.abs(r.y[0] - y) <= 4 && place(r.x[0]) <= x + 2 && place(r.x[1]) >= x - 2)
      ?? data.cuts.find((cut) => Math.abs(place(cut.x) - x) <= 5 && cut.top <= y && cut.bottom >= y)
      ?? seen.bars.findLast(covers) ?? seen.waits.findLast(covers) ?? flight(at, y) ?? null
  }

  function flight(at, y) {
    const found = chosen.layers.has(FLIGHT) && data.bands.find((b) => b.y[0] <= y && b.y[1] >= y)
    const point = found && found.points.findLast(([time]) => time <= at)
    return point ? { tip: `${found.head}${point[1]} reward requests in flight\nat\t${at.toFixed(2)} s\nat most\t${found.most}` }
      : undefined
  }

  function point(event) {
    const place = chart.getBoundingClientRect()
    pointer = event && event.clientX - place.left
    const found = event && under(pointer, event.clientY - place.top)
    if (found?.task !== pointed?.task || found !== pointed) later()
    pointed = found
    chart.style.cursor = found?.address ? "pointer" : ""
    tip.hidden = !found
    if (!found) return
    const [head, ...facts] = found.tip.split("\n")
    const bold = Object.assign(document.createElement("b"), { textContent: head })
    tip.replaceChildren(bold, ...(facts.length ? ["\n" + facts.join("\n")] : []))
    const { width, height } = tip.getBoundingClientRect()
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8)) + "px"
    tip.style.top = (event.clientY + 14 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 14) + "px"
  }

  // --- moving ---------------------------------------------------------------------------------------------

  function show(from, to) {
    const least = Math.min(data.length, 1e-3), long = Math.min(data.length, Math.max(least, to - from))
    view.from = Math.max(0, Math.min(from, data.length - long))
    view.to = view.from + long
    later()
  }

  const pan = (share) => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from))

  function zoom(factor) {
    const at = pointer === null ? (view.from + view.to) / 2 : second(Math.min(LEFT + wide(), Math.max(LEFT, pointer)))
    show(at - (at - view.from) * factor, at + (view.to - at) * factor)
  }

  // Calls move(seconds, seconds before) while a pointer is dragged, and clicked() if it was not.
  function dragged(canvas, secondAt, begin, move, clicked) {
    canvas.addEventListener("pointerdown", (down) => {
      const start = secondAt(down), was = { ...view }
      let far = false
      begin(start)
      canvas.setPointerCapture(down.pointerId)
      canvas.onpointermove = (event) => {
        far ||= Math.abs(event.clientX - down.clientX) > 3
        if (far) move(event, start, was, down)
      }
      canvas.onpointerup = canvas.onpointercancel = () => {
        canvas.onpointermove = canvas.onpointerup = canvas.onpointercancel = null
        if (!far) clicked()
      }
    })
  }

  const inOverview = (event) => (event.clientX - overview.getBoundingClientRect().left - LEFT) / wide() * data.length
  let holds = false // the window of the overview

  const KEYS = {
    w: () => zoom(0.75), s: () => zoom(1 / 0.75), a: () => pan(-0.15), d: () => pan(0.15),
    arrowleft: () => pan(-0.15), arrowright: () => pan(0.15), 0: () => show(0, data.length),
  }

  function press(event) {
    const act = KEYS[event.key.toLowerCase()]
    if (!act || event.ctrlKey || event.metaKey || event.altKey || event.target.type === "number") return
    event.preventDefault()
    act()
  }

  // --- switches -------------------------------------------------------------------------------------------

  function switches(id, names, into, mark, off = []) {
    for (const name of names) {
      const input = Object.assign(document.createElement("input"), { type: "checkbox", checked: !off.includes(name) })
      const words = document.createElement("label"), swatch = document.createElement("i")
      if (input.checked) into.add(name)
      mark(swatch, name)
      words.append(input, swatch, name)
      $(id).append(words)
      input.addEventListener("change", () => {
        if (input.checked) into.add(name)
        else into.delete(name)
        later()
      })
    }
  }

  function stepped() {
    [chosen.first, chosen.last] = ["first", "last"].map((id) => Number($(id).value))
    const bars = data.bars.filter(passes)
    const from = Math.min(...bars.map((bar) => bar.x[0])), to = Math.max(...bars.map((bar) => bar.x[1]))
    if (chosen.first === first && chosen.last === last) show(0, data.length)
    else if (to > from) show(from - 0.01 * (to - from), to + 0.01 * (to - from))
    later()
  }

  // --- start ----------------------------------------------------------------------------------------------

  switches("stages", Object.keys(data.stages), chosen.stages, (swatch, name) => {
    swatch.style.background = `light-dark(${data.stages[name][0]}, ${data.stages[name][1]})`
  })
  switches("layers", LAYERS, chosen.layers, (swatch, name) => { swatch.className = "layer-" + LAYERS.indexOf(name) }, OFF)
  for (const [id, value] of [["first", first], ["last", last]]) {
    Object.assign($(id), { min: first, max: last, value })
    $(id).addEventListener("change", stepped)
  }
  $("steps").hidden = first === last
  chart.addEventListener("pointermove", point)
  chart.addEventListener("pointerleave", () => point(null))
  chart.addEventListener("wheel", (event) => {
    event.preventDefault()
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / 1000)
    else zoom(1.0015 ** event.deltaY)
  }, { passive: false })
  dragged(chart, () => 0, () => {}, (event, _, was, down) => {
    const moved = (event.clientX - down.clientX) / scale()
    show(was.from - moved, was.to - moved)
  }, () => pointed?.address && open(pointed.address, "samples"))
  dragged(overview, inOverview, (at) => { holds = at >= view.from && at <= view.to && view.to - view.from < data.length },
    (event, start, was) => {
      const at = inOverview(event)
      if (holds) show(was.from + at - start, was.to + at - start)
      else show(Math.min(start, at), Math.max(start, at))
    }, () => {})
  for (const button of document.querySelectorAll("button.go")) {
    button.addEventListener("click", () => {
      const from = Number(button.dataset.from), to = Number(button.dataset.to), around = Math.max(to - from, 0.05)
      show(from - 2 * around, to + 2 * around)
      chart.scrollIntoView({ block: "nearest" })
    })
  }
  addEventListener("keydown", press)
  dark.addEventListener("change", theme)
  new ResizeObserver(later).observe(chart)
  theme()
  draw()
  document.documentElement.dataset.ready = "yes"
  return { data, view, seen, chosen, place, show }
})()
