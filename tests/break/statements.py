"""SQL that tries to leave the sandbox of `conserve sql`: a list of known ways, and a seeded generator of more."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

READERS = (
    "read_csv", "read_csv_auto", "read_parquet", "parquet_scan", "read_json", "read_json_auto", "read_ndjson",
    "read_ndjson_auto", "read_json_objects", "read_json_objects_auto", "read_ndjson_objects", "read_text",
    "read_blob", "glob", "sniff_csv", "parquet_metadata", "parquet_schema", "parquet_file_metadata",
    "parquet_kv_metadata", "read_duckdb", "sqlite_scan", "postgres_scan", "mysql_scan", "st_read", "read_xlsx",
    "iceberg_scan", "delta_scan", "query", "query_table", "read_avro", "read_arrow", "scan_arrow_ipc",
    "load_file",
)  # fmt: skip
SETTINGS = (
    "enable_external_access = true", "lock_configuration = false", "allowed_paths = ['/']",
    "allowed_directories = ['/']", "allowed_configs = ['threads']", "memory_limit = '1TB'", "threads = 64",
    "temp_directory = '/tmp'", "max_temp_directory_size = '1TB'", "autoload_known_extensions = true",
    "autoinstall_known_extensions = true", "allow_unsigned_extensions = true", "home_directory = '/'",
    "allow_persistent_secrets = true", "secret_directory = '/'", "extension_directory = '/'",
    "python_enable_replacements = true", "file_search_path = '/etc'", "search_path = 'store'",
    "enable_logging = true", "enable_profiling = 'json'", "profiling_output = '{path}'",
    "log_query_path = '{path}'",
    "custom_extension_repository = 'http://127.0.0.1:1'", "http_proxy = '127.0.0.1:1'", "timezone = 'CET'",
    "enable_http_metadata_cache = true", "logging_storage = 'file'",
)  # fmt: skip
STATEMENTS = (
    "copy results to '{path}.new'", "copy (select 1) to '{path}.new' (format parquet)", "copy jobs from '{path}'",
    "copy (from '{path}') to '{path}.new'", "copy (select 1) to '{path}.new' (format csv, partition_by ('1'))",
    "copy from database memory to other", "attach '{path}'", "attach '{path}' as d (read_only)",
    "attach 'sqlite:{path}' as d", "attach ':memory:' as d", "attach if not exists '{path}' as memory",
    "detach store",
    "use store", "install httpfs", "install '{path}'", "force install httpfs from 'http://127.0.0.1:1'",
    "load httpfs", "load '{path}'", "update extensions", "export database '{path}.new'",
    "import database '{path}'",
    "create table t as from '{path}'", "create view v as from '{path}'",
    "create macro m() as table from '{path}'",
    "create temp macro m(p) as table from read_text(p)", "create secret s (type s3, key_id 'a', secret 'b')",
    "create persistent secret s (type http)", "drop view results", "create or replace view results as select 1",
    "insert into store.journal select * from store.journal", "update jobs set state = 'queued'",
    "delete from jobs",
    "truncate jobs", "alter table jobs add column x int", "prepare p as from '{path}'", "execute p('{path}')",
    "deallocate p", "checkpoint", "force checkpoint", "vacuum", "analyze", "begin", "commit", "rollback",
    "call pragma_database_list()", "call enable_logging(storage = 'file', storage_path = '{path}.new')",
    "call enable_logging('QueryLog', storage_path = '{path}.new')", "call enable_profiling()",
    "call dbgen(sf = 1)",
    "explain analyze from '{path}'", "explain copy (select 1) to '{path}.new'", "explain from '{path}'",
    "set variable x = (select content from read_text('{path}'))", "reset variable x",
    "comment on view jobs is 'x'",
    "pragma enable_profiling", "pragma import_database('{path}')", "pragma show('{path}')",
    "pragma storage_info('{path}')",
    "pragma table_info('{path}')", "pragma add_parquet_key('a', '0123456789112345')",
    "merge into jobs using jobs on true",
    "from json_execute_serialized_sql(json_serialize_sql('with x as (copy (select 9) to ''{path}'' "
    "(format csv, use_tmp_file false)) select 1'))",
    "from query('with x as (copy (select 9) to ''{path}'' (format csv, use_tmp_file false)) select 1')",
    "from query('from json_execute_serialized_sql(json_serialize_sql(''with x as (copy (select 9) to "
    "{path}) select 1''))')",
    "from (pivot (from json_execute_serialized_sql(json_serialize_sql('with x as (copy (select 9) to ''{path}'') "
    "select 1 as k'))) on k)",
    "pivot (from json_execute_serialized_sql(json_serialize_sql('with x as (copy (select 9) to ''{path}'') "
    "select 1 as k'))) on k",
)  # fmt: skip
TABLES = (
    "{call}", "(from {call})", "(select * from {call}) x", "lateral (select * from {call})", "results, {call}",
    "jobs left join {call} on true", "jobs positional join {call}", "{call} tablesample 1 rows",
    "{call} with ordinality",
    "(select 1 union all by name select * from {call})", "(pivot (select 1 as k, * from {call}) on k)",
    "(summarize {call})",
    "(describe select * from {call})", "(unpivot {call} on columns(*))",
    "(values ((select count(*) from {call})))",
    "query('from {quoted}')", "query_table(['{path}'])", "query_table('{path}')",
    "json_execute_serialized_sql(json_serialize_sql('select * from {quoted}'))",
)  # fmt: skip
QUERIES = (
    "select * from {table}", "from {table}", "with t as (select * from {table}) select * from t",
    "with t as materialized (from {table}) from t", "select (select count(*) from {table})",
    "select * from jobs where exists (from {table})", "select * from jobs where id in (select 'x' from {table})",
    "with recursive t as (select 1 as n union all select n + 1 from t, {table} where n < 3) from t",
    "summarize from {table}", "describe from {table}", "summarize {table}", "describe {table}",
    "pivot (select 1 as k, * from {table}) on k",
    "from (pivot (select 1 as k, * from {table}) on k using count(*))", "values ((select 1 from {table}))",
    "select 1 union all select 1 from {table}", "select list((select 1 from {table})) from results",
    "(select * from {table} limit 1)", "/* a */ select -- b\n * from {table}", "select * from {table};",
    "select columns(*) from {table}", "from {table} select 1 order by all limit 3",
    "select x from (select unnest([1, 2]) as x) where x = (select count(*) from {table})",
)  # fmt: skip
SPELLINGS: Sequence[Callable[[Path], str]] = (
    str,
    lambda path: f"file://{path}",
    lambda path: f"file:{path}",
    lambda path: f"file://localhost{path}",
    lambda path: f"{path.parent}/*",
    lambda path: f"{path.parent}/**",
    lambda path: f"{path.parent.parent}/**/*.csv",
    lambda path: f"{path.parent}/../{path.parent.name}/{path.name}",
    lambda path: f"//{path}",
    lambda path: f"{path}/",
    lambda path: f"{path}?x=1",
    lambda path: f"{path}#x",
    lambda path: str(path).replace("secret", "s[e]cret"),
    lambda path: str(path).replace("secret", "secre?"),
    lambda path: f"~/{path.name}",
    lambda path: f"../{path.parent.name}/{path.name}",
    lambda path: f"../../../../../../../../..{path}",
    lambda path: f"/proc/self/root{path}",
    lambda path: f"/proc/self/cwd/../{path.parent.name}/{path.name}",
    lambda path: f"http://127.0.0.1:1{path}",
    lambda path: f"s3://bucket{path}",
    lambda path: f"hf://datasets{path}",
    lambda path: f"zip://{path}/x",
    lambda path: f"gzip:{path}",
    lambda path: f"{path}\x00.csv",
    lambda path: str(path).upper(),
    lambda path: "/proc/self/environ",
    lambda path: "/dev/stdin",
)


def known(paths: Sequence[Path]) -> Iterator[str]:
    """Each known way, once for each file or so."""
    for number, path in enumerate(paths):
        for reader in READERS:
            yield f"select * from {reader}('{path}')"
        yield from (statement.replace("{path}", str(path)) for statement in STATEMENTS)
        yield from (f"from '{spelling(path)}'" for spelling in SPELLINGS)
        yield from (
            f"summarize '{path}'",
            f"describe '{path}'",
            f'select * from "{path}"',
            f"pivot '{path}' on 1",
        )
        yield f"select getenv('HOME'), '{number}'"
        for setting in SETTINGS:
            for verb in ("set", "set global", "set session", "pragma", "set local"):
                yield f"{verb} {setting.replace('{path}', str(path))}"
            yield f"reset {setting.partition(' ')[0]}"


class Function(NamedTuple):
    """A function of DuckDB's catalogue and its parameters."""

    name: str
    parameters: Sequence[str]
    types: Sequence[str]
    makes_rows: bool


class Generator:
    """Statements by chance, the same ones for the same seed."""

    def __init__(self, seed: int, paths: Sequence[Path], functions: Sequence[Function]) -> None:
        self._dice = random.Random(seed)
        self._paths, self._functions = paths, functions

    def statements(self, count: int) -> Iterator[str]:
        """Yield so many statements."""
        for _ in range(count):
            yield self._statement()

    def _statement(self) -> str:
        chance = self._dice.random()
        if chance < 0.15:
            return self._pick(STATEMENTS).replace("{path}", self._path())
        if chance < 0.25:
            setting = self._pick(SETTINGS).replace("{path}", self._path())
            verb = self._pick(("set", "set global", "reset", "pragma", "set session"))
            return f"{verb} {setting.partition(' ')[0] if verb == 'reset' else setting}"
        query = self._query(self._dice.randrange(1, 4))
        if chance < 0.35:
            return self._pick(
                (
                    "copy ({q}) to '{p}.new'",
                    "explain {q}",
                    "create table t as {q}",
                    "{q}; {q}",
                    "prepare p as {q}",
                )
            ).format(q=query, p=self._path())
        return query

    def _query(self, depth: int) -> str:
        table = self._table()
        for _ in range(depth):
            query = self._pick(QUERIES).replace("{table}", table)
            table = f"({query.rstrip(';')})"
        return query

    def _table(self) -> str:
        call = self._call()
        shape = self._pick(TABLES)
        return (
            shape.replace("{call}", call)
            .replace("{quoted}", call.replace("'", "''"))
            .replace("{path}", self._path())
        )

    def _call(self) -> str:
        path = self._path()
        if self._dice.random() < 0.2:
            return f"'{path}'"
        if self._dice.random() < 0.5:
            function = self._dice.choice(self._functions)
            call = self._catalogued(function)
            return call if function.makes_rows else f"(select {call})"
        name = self._pick(READERS)
        others = self._pick(("", "", f", '{self._path()}'", ", 1", ", filename = true", ", true"))
        return f"{name}({self._value('ANY')}{others})"

    def _catalogued(self, function: Function) -> str:
        """A call with some of its parameters, by place or by name."""
        arguments = []
        for number, (name, kind) in enumerate(zip(function.parameters, function.types, strict=False)):
            chance = self._dice.random()
            if number < 2 and chance < 0.9:
                arguments.append(self._value(kind))
            elif chance < 2 / max(2, len(function.types)):
                arguments.append(f'"{name}" := {self._value(kind)}')
        return f'"{function.name}"({", ".join(arguments)})'

    def _value(self, kind: str) -> str:
        path = self._path()
        if kind == "BOOLEAN":
            return self._pick(("true", "false"))
        if "INT" in kind or kind == "DOUBLE":
            return self._pick(("0", "1", "100", "-1"))
        if kind.endswith("[]"):
            return self._pick((f"['{path}']", f"['{path}', '{self._path()}']", "[]"))
        return self._pick(
            (f"'{path}'", f"'{path}'::varchar", f"['{path}']", f"'{path}'::json::varchar", "'results'")
        )

    def _path(self) -> str:
        return self._pick(SPELLINGS)(self._pick(self._paths)).replace("'", "''")

    def _pick(self, things: Sequence[str]) -> "str":
        return self._dice.choice(things)
