"""Drawings of the mechanisms of the engine."""

from tools.docs.drawings import Arrow, Box, Drawing, Lane, Rule, Words

PREEMPTION = Drawing(
    "A request arrives while the worker runs an iteration. A policy on the I/O thread chooses rows and raises a"
    " flag. The worker sees it at the safepoint before layer 8; the rows leave, the others go on. The main "
    "thread settles the iteration and plans the next with the arrival; a later one takes the rows up at layer "
    "8.",
    702,
    246,
    (
        Lane(3, 3, 698, 64, "I/O thread"),
        Lane(3, 81, 696, 66, "main thread"),
        Lane(3, 161, 696, 80, "worker"),
        Box(180, 14, 85, 42, "request\narrives", "live"),
        Box(300, 14, 140, 42, "which rows\nleave?"),
        Arrow("request", "which rows"),
        Box(105, 93, 95, 42, "plan, stamp"),
        Box(405, 93, 115, 42, "settle: rewind\nrows that left"),
        Box(550, 93, 148, 42, "plan: the arrival,\nthen the rows", name="plan again"),
        Arrow("settle: rewind", "plan again"),
        Box(105, 185, 194, 42, "layers 0 to 7\nwith the rows", "ours"),
        Box(299, 185, 76, 42, "safepoint\nlayer 8", "mark"),
        Box(375, 185, 85, 42, "8 to 29\nthe others"),
        Box(530, 185, 82, 42, "0 to 29\n+ arrival", "live"),
        Box(616, 185, 82, 42, "rows join\nat layer 8", "ours"),
        Arrow("plan, stamp", "layers 0 to 7"),
        Arrow("which rows", "safepoint", "the flag, one word\nof shared memory", other=True),
        Arrow("8 to 29", "settle: rewind"),
        Arrow("plan again", "0 to 29"),
        Arrow("plan again", "rows join"),
    ),
)
CHECKPOINTS = Drawing(
    "Confirmed KV blocks of offline rows are copied from the device to host memory beside iterations. When "
    "memory is short a row is evicted; when it is back the row gets blocks, its KV is copied back in parts, and"
    " it runs on at its token. A clean stop writes host memory to disk, and the next start reads it.",
    700,
    352,
    (
        Box(5, 10, 115, 44, "row runs", "ours"),
        Box(170, 10, 135, 44, "memory is short:\nrow is evicted", "mark"),
        Box(365, 10, 135, 44, "memory is back:\nrow gets blocks"),
        Box(570, 10, 125, 44, "row runs on\nat its token", "ours"),
        Arrow("row runs", "memory is short:"),
        Arrow("memory is short:", "memory is back:"),
        Arrow("memory is back:", "row runs on", "all there"),
        Box(5, 112, 690, 36, "KV blocks on the device"),
        Arrow("row runs", "KV blocks on the device", "computes"),
        Arrow("memory is short:", "KV blocks on the device", "frees its blocks"),
        Arrow("memory is back:", "KV blocks on the device", "takes free ones"),
        Box(5, 212, 690, 36, "checkpoints in host memory", "kept"),
        Arrow(
            "KV blocks on the device",
            "checkpoints in host memory",
            "confirmed blocks, as the policy\nchooses, beside iterations",
            -280,
        ),
        Arrow(
            "checkpoints in host memory",
            "KV blocks on the device",
            "back in parts,\nbeside iterations",
            82,
        ),
        Box(5, 308, 690, 36, "files of --kv-spill", "kept"),
        Arrow("checkpoints in host memory", "files of --kv-spill", "written at a clean stop", -280),
        Arrow("files of --kv-spill", "checkpoints in host memory", "read at the next start", 82),
    ),
)
SPILL = Drawing(
    "At SIGTERM the supervisor asks the engine core to spill. It gathers the full blocks of offline rows, the "
    "workers write shards with checksums, and the core writes the index once all are there. At the next start "
    "the core compares the index with the engine, the workers read the shards and compare checksums, and rows "
    "that come back find their blocks by hash.",
    702,
    246,
    (
        Lane(3, 3, 696, 64, "supervisor"),
        Lane(3, 81, 696, 66, "engine core"),
        Lane(3, 161, 696, 80, "workers"),
        Box(105, 14, 85, 42, "SIGTERM", "mark"),
        Box(270, 14, 125, 42, "stop harvester,\nthen server"),
        Box(430, 14, 85, 42, "start"),
        Box(105, 93, 122, 42, "gather: blocks\nof offline rows"),
        Box(270, 93, 115, 42, "all shards are\nthere: index", "kept"),
        Box(430, 93, 115, 42, "index: of this\nengine?"),
        Box(575, 93, 118, 42, "rows come back:\nfound by hash", "ours"),
        Box(105, 185, 138, 42, "write in a thread\nbeside iterations"),
        Box(270, 185, 115, 42, "shards,\nchecksums", "kept"),
        Box(430, 185, 130, 42, "read, compare\nchecksums"),
        Arrow("SIGTERM", "gather: blocks", "/v1/conserve/spill", -5),
        Arrow("gather: blocks", "write in a thread"),
        Arrow("write in a thread", "shards,"),
        Arrow("shards,", "all shards are"),
        Arrow("all shards are", "stop harvester,"),
        Arrow("stop harvester,", "start"),
        Arrow("start", "index: of this"),
        Arrow("index: of this", "read, compare"),
        Arrow("read, compare", "rows come back:"),
    ),
)
SERVING = Drawing(
    "The supervisor, conserve serve, starts vLLM's OpenAI server and the harvester. Live clients and the "
    "harvester send HTTP to the same API server, the harvester with priority 1000. The engine core looks, plans"
    " and applies around vLLM's own schedule. The harvester leases rows of the store and writes answers to its "
    "journal.",
    702,
    248,
    (
        Lane(195, 3, 375, 124, "vLLM's OpenAI server"),
        Box(5, 50, 105, 44, "live clients", "live"),
        Box(208, 50, 115, 44, "API server\nplug-in, keys"),
        Box(415, 50, 140, 44, "engine core\nlook, plan, apply", "ours"),
        Box(600, 50, 97, 44, "workers\nsafepoints"),
        Arrow("live clients", "API server", "HTTP"),
        Arrow("API server", "engine core", "requests"),
        Arrow("engine core", "workers"),
        Box(5, 195, 112, 44, "store\nlease, journal", "kept"),
        Box(208, 195, 115, 44, "harvester\npriority 1000", "ours"),
        Box(415, 195, 140, 44, "conserve serve\nthe supervisor"),
        Arrow("store", "harvester", "rows", -9),
        Arrow("harvester", "store", "answers", 9, other=True),
        Arrow("harvester", "API server", "HTTP on loopback"),
        Arrow("conserve serve", "harvester", "starts"),
        Arrow("conserve serve", "engine core", "starts, watches"),
    ),
)
BUDGET = Drawing(
    "The time of an iteration beside live requests: its constant part, then the live requests' decode steps and"
    " prompts (phase 1), then offline tokens as far as the SLO or the harm leaves time (phase 2), less the "
    "margin of the prediction. After a minute without a live request an iteration is filled with offline "
    "tokens.",
    700,
    206,
    (
        Words(20, 18, "beside live requests", "name"),
        Words(115, 46, "phase 1"),
        Words(330, 46, "phase 2"),
        Box(20, 54, 90, 42, "constant\npart"),
        Box(110, 54, 215, 42, "live decode steps and\nchunks of live prompts", "live"),
        Box(325, 54, 175, 42, "offline tokens", "ours", "beside"),
        Box(500, 54, 70, 42, "margin"),
        Rule(570, 28, 570, 104),
        Words(577, 46, "what the SLO or"),
        Words(577, 62, "the harm leaves"),
        Words(20, 136, "after a minute without a live request, where rows can leave", "name"),
        Box(20, 148, 90, 42, "constant\npart", name="alone constant"),
        Box(110, 148, 585, 42, "offline tokens, as long as the engine takes", "ours", "alone"),
    ),
)
PROFILES = Drawing(
    "Points worth measuring are timed as steps of the engine core; a model is fitted to them and judged by "
    "held-out batches, and the profile is kept by its key. While the engine runs, the model predicts a batch, "
    "the plan takes the tokens that fit, the iteration's real time corrects the model and its margin. Without a"
    " profile a warm-up begins that loop.",
    700,
    266,
    (
        Box(5, 10, 115, 44, "points worth\nmeasuring"),
        Box(175, 10, 130, 44, "steps of the\nengine, timed"),
        Box(360, 10, 140, 44, "fit; errors by\nheld-out batches"),
        Box(556, 10, 142, 44, "profile\na file, by its key", "kept"),
        Arrow("points worth", "steps of the"),
        Arrow("steps of the", "fit; errors by"),
        Arrow("fit; errors by", "profile"),
        Box(556, 116, 142, 44, "predict\ntime of a batch", "ours"),
        Box(360, 116, 140, 44, "plan\ntokens that fit", "ours"),
        Box(175, 116, 130, 44, "iteration\nits real time", "ours"),
        Box(175, 212, 130, 44, "correction\nmodel, margin", "ours"),
        Box(5, 212, 115, 44, "warm-up\nwithout a file"),
        Arrow("profile", "predict", "at the start", other=True),
        Arrow("predict", "plan"),
        Arrow("plan", "iteration"),
        Arrow("iteration", "correction"),
        Arrow("correction", "predict", "the next batches"),
        Arrow("warm-up", "correction"),
    ),
)
MACHINE = Drawing(
    "The flags of the engine follow from the machine: cores and memory by affinity and control group, and the "
    "number format in which a row takes least time, measured on a decoder layer's products with vLLM's own "
    "kernels. The choice of format is kept in a file.",
    700,
    200,
    (
        Box(5, 10, 150, 44, "cores and memory\naffinity, cgroup"),
        Box(5, 96, 150, 44, "the model's shapes\nvLLM's kernels"),
        Box(200, 88, 180, 60, "time a layer's products\n128 and 16 tokens\n0.25 to 0.75 s", "ours"),
        Box(425, 96, 130, 44, "number format\nof least time", "ours"),
        Box(600, 10, 95, 130, "flags\n--dtype\nKV memory\nthreads", "kept"),
        Box(425, 160, 130, 32, "file of choices", "kept"),
        Arrow("cores and memory", "flags", "cores that compute, memory for weights and KV"),
        Arrow("the model's shapes", "time a layer's products"),
        Arrow("time a layer's products", "number format"),
        Arrow("number format", "flags"),
        Arrow("number format", "file of choices"),
    ),
)
DRAWINGS = {
    "preemption.svg": PREEMPTION,
    "checkpoints.svg": CHECKPOINTS,
    "spill.svg": SPILL,
    "co-serving.svg": SERVING,
    "budget.svg": BUDGET,
    "latency-profiles.svg": PROFILES,
    "machine.svg": MACHINE,
}
