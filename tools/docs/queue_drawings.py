"""Drawings of the mechanisms of the queue: a row's way, store, harvester, order, verdicts."""

from tools.docs.drawings import Arrow, Box, Drawing, Lane, Rule, Words

ROWS = Drawing(
    "A row is rendered from the input file into requests.parquet, where it waits until it is leased. In its "
    "first attempt it belongs to a span; with saved tokens or put back it is a request of its own. Its answer "
    "goes to the journal, and from there to a shard. SQL reads journal and shards.",
    702,
    170,
    (
        Box(3, 12, 100, 44, "data.parquet"),
        Box(158, 12, 134, 44, "requests.parquet\nnever leased", "kept"),
        Box(342, 12, 108, 44, "span\nfirst attempt", "kept"),
        Box(512, 12, 72, 44, "journal\nfinished", "kept"),
        Box(646, 12, 53, 44, "shard", "kept"),
        Box(342, 116, 108, 44, "request\nits own way", "kept"),
        Box(562, 116, 137, 44, "SQL views"),
        Arrow("data.parquet", "requests.parquet", "render"),
        Arrow("requests.parquet", "span", "lease"),
        Arrow("span", "journal", "answer"),
        Arrow("journal", "shard", "compact"),
        Arrow("span", "request", "tokens saved, put back", other=True),
        Arrow("request", "journal", "answer"),
        Arrow("journal", "SQL views"),
        Arrow("shard", "SQL views"),
    ),
)
STORE = Drawing(
    "Submit and the harvester write jobs, leases and results into the database in transactions; compaction "
    "moves finished rows of the journal into shards, which never change. Status reads counters. A query runs in"
    " a child process with bounded memory, on one moment of the database and the shards that it names.",
    700,
    232,
    (
        Lane(3, 3, 150, 222, "writers"),
        Lane(238, 3, 194, 222, "the store"),
        Lane(530, 3, 167, 222, "readers"),
        Box(15, 35, 125, 40, "submit"),
        Box(15, 95, 125, 44, "harvester"),
        Box(15, 165, 125, 44, "compaction"),
        Box(250, 35, 170, 104, "SQLite or PostgreSQL\njobs, leases, spans,\nrequests, journal", "kept"),
        Box(250, 165, 170, 44, "folder or bucket\nrequests, shards", "kept"),
        Box(542, 35, 143, 40, "conserve status"),
        Box(542, 95, 143, 114, "child process\nDuckDB, bounded\none SELECT", "ours"),
        Arrow("submit", "SQLite or PostgreSQL", "a job"),
        Arrow("harvester", "SQLite or PostgreSQL", "transactions"),
        Arrow("compaction", "folder or bucket", "shards"),
        Arrow("SQLite or PostgreSQL", "conserve status", "counters"),
        Arrow("SQLite or PostgreSQL", "child process", "one moment"),
        Arrow("folder or bucket", "child process", "named files"),
    ),
)
HARVESTER = Drawing(
    "Four tasks in one event loop: feed claims rows of the store, work sends each row to the endpoint and waits"
    " for its answer, record writes finished rows in one transaction every quarter of a second or 512 results, "
    "and watch renews leases every 20 seconds and looks for paused and cancelled jobs.",
    702,
    246,
    (
        Lane(203, 3, 294, 238, "one event loop"),
        Box(3, 38, 100, 192, "store\nin a thread", "kept"),
        Box(215, 38, 90, 44, "feed", "ours"),
        Box(395, 38, 90, 44, "work\none a row", "ours"),
        Box(215, 118, 270, 44, "record\nevery 0.25 s or 512 results", "ours"),
        Box(215, 186, 270, 44, "watch\npaused and cancelled jobs", "ours"),
        Box(590, 38, 109, 192, "endpoint\nengine,\nserver, fleet"),
        Arrow("store", "feed", "claims rows"),
        Arrow("feed", "work", "rows"),
        Arrow("work", "endpoint", "request", -10),
        Arrow("endpoint", "work", "answer, tokens", 10, other=True),
        Arrow("work", "record", "outcomes", other=True),
        Arrow("record", "store", "a transaction"),
        Arrow("watch", "store", "renews,\nevery 20 s"),
    ),
)
ORDER = Drawing(
    "A prefix tree of three shared beginnings. Rows run depth first: the rows under the first subject one after"
    " the other, then those under the second. A row that shares nothing waits apart, and takes one of the turns"
    " that go to the stalest row.",
    700,
    232,
    (
        Box(180, 10, 190, 36, "the same system prompt"),
        Box(40, 84, 170, 36, "five shots of law"),
        Box(330, 84, 190, 36, "five shots of algebra"),
        Arrow("the same system prompt", "five shots of law"),
        Arrow("the same system prompt", "five shots of algebra"),
        Box(10, 158, 72, 36, "1st", "ours"),
        Box(94, 158, 72, 36, "2nd", "ours"),
        Box(178, 158, 72, 36, "3rd", "ours"),
        Box(318, 158, 72, 36, "5th", "ours"),
        Box(450, 158, 72, 36, "6th", "ours"),
        Arrow("five shots of law", "1st"),
        Arrow("five shots of law", "2nd"),
        Arrow("five shots of law", "3rd"),
        Arrow("five shots of algebra", "5th"),
        Arrow("five shots of algebra", "6th"),
        Box(585, 158, 105, 36, "4th: stalest", "live"),
        Words(575, 112, "shares nothing,"),
        Words(575, 128, "waits longest"),
        Words(10, 220, "blue: turns that go depth first (utility); orange: a turn of the rest"),
    ),
)
VERDICTS = Drawing(
    "The interval of a change of the mean score beside no change and the fall that counts. Worse: the interval "
    "lies below no change and reaches the fall that counts. No worse: it lies above the fall that counts, also "
    "if a smaller decline is certain. Cannot tell: it reaches both.",
    700,
    226,
    (
        Words(400, 18, "the fall that counts", anchor="middle"),
        Words(590, 18, "no change", anchor="middle"),
        Rule(400, 26, 400, 190),
        Rule(590, 26, 590, 190),
        Rule(240, 196, 695, 196, "axis"),
        Words(240, 214, "score falls"),
        Words(695, 214, "score rises", anchor="end"),
        Words(5, 53, "worse", "name"),
        Words(5, 93, "no worse", "name"),
        Words(5, 133, "no worse: a decline, but less", "name"),
        Words(5, 173, "cannot tell", "name"),
        Box(290, 42, 240, 14, "", "mark", "first"),
        Box(440, 82, 210, 14, "", "kept", "second"),
        Box(430, 122, 120, 14, "", "kept", "third"),
        Box(340, 162, 310, 14, "", "box", "fourth"),
    ),
)
DRAWINGS = {
    "rows.svg": ROWS,
    "store.svg": STORE,
    "harvester.svg": HARVESTER,
    "order.svg": ORDER,
    "verdicts.svg": VERDICTS,
}
