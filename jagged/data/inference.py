"""What the columns of a table are for, found out from their types, names and values; the user's words and files win over it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jagged.data.errors import refuse, shown
from jagged.data.schema import Column, Kind, Schema, beside
from jagged.data.sources import Table, identifier
from jagged.data.tabular import is_list
from jagged.data.values import CALENDAR, DECIMAL, OTHER_DATES, WHOLE, element, form, missing_sql, texts_sql, value_sql

# Names, as `plain_name` gives them; of a kind of which there is one the first name wins.
_USERS = (
    "user_id", "user", "uid", "userid", "user_uid", "customer_id", "customer", "visitor_id", "visitorid", "member_id",
    "reviewer_id", "reviewerid", "account_id", "client_id", "profile_id", "person_id",
    "username", "user_name",
)  # fmt: skip
_THINGS = (
    "item", "product", "movie", "video", "article", "news", "song", "track", "artist", "book", "ad", "adgroup", "creative",
    "game", "app", "post", "photo", "content", "doc", "document", "recipe", "business", "listing", "hotel", "prop", "anime",
    "poi", "venue", "pin", "sku", "goods", "offer", "coupon", "job",
)  # fmt: skip
_CANDIDATES = (
    *(name for one in _THINGS for name in (f"{one}_id", f"{one}id", one)), "iid", "asin", "parent_asin", "isbn", "mid",
)  # fmt: skip
_TIMES = (
    "timestamp", "time", "ts", "event_time", "event_timestamp", "time_stamp", "datetime", "date_time", "unix_timestamp",
    "unix_time", "unixtime", "unix_review_time", "time_ms", "timestamp_ms", "date", "when",
)  # fmt: skip
_REQUESTS = (
    "request_id",
    "impression_id",
    "session_id",
    "query_id",
    "search_id",
    "srch_id",
    "display_id",
    "list_id",
    "sessionid",
    "requestid",
)
_WEIGHTS = ("sample_weight", "weight", "instance_weight", "importance_weight")
_EVENTS = (
    "event_type",
    "event",
    "action",
    "action_type",
    "behavior",
    "behavior_type",
    "behaviour",
    "interaction_type",
    "event_name",
)
# Labels whatever numbers they hold, and those that only 0 and 1 make labels.
_LABELS = {"label", "labels", "target"}
_ACTIONS = {
    "click", "clicked", "purchase", "purchased", "like", "liked", "conversion", "converted", "buy", "bought", "rating", "follow",
    "followed", "share", "shared", "comment", "forward", "hate", "long_view", "installed", "install", "order", "ordered", "cart",
    "add_to_cart", "favorite", "favourite", "booking_bool", "click_bool", "recommended", "finish", "clk", "watched",
}  # fmt: skip
_ROW_NUMBERS = {"id", "index", "row", "row_id", "unnamed_0", "row_number"}

# Whole numbers that are ids however many there are, and those that are where there are few.
_IDS = re.compile(
    r"(^|_)(ids?|uid|gid|hash|codes?|key|isbn|asin|sku)$|^(c|cat|cate|category|sparse|cat_feature|hist|history)_?[0-9]+$"
    r"|(^|_)(?!(un|pre)?paid$|(in)?valid$|(max|min)?bid$|grid$|android$|solid$|liquid$|rapid$|hybrid$|void$|covid$)[a-z]{2,}id$"
)
_CATEGORIES = re.compile(
    r"(^|_)(type|category|categories|cate|cat|class|genre|gender|sex|country|city|state|region|zip|zipcode|zip_code|postcode|lang|language"
    r"|device|os|browser|brand|platform|channel|network|site|domain|model|segment|group|cluster|occupation|job|shop|seller|store|tab|page"
    r"|slot|pos|position|hour|weekday|day|month|dow|day_of_week|level|bucket|status|flag|tag)$|^is_"
)
_CATEGORICAL_VALUES = 1_000
_ELAPSED = re.compile(r"(^|_)(at|ts|timestamp|time|datetime|date)(_?(ms|us|sec|seconds))?$")
# Lists of ids, between which a blank may stand, and of words, whose blanks belong to them.
_LISTS_OF_IDS = re.compile(r"(^|_)(hist|history|histories|seq|sequence|list|ids|items|clicked|viewed|recent|past|tokens)(_|$)")
_LISTS_OF_WORDS = re.compile(r"(^|_)(tags|genres|categories|keywords|authors|actors|artists|labels|topics)(_|$)")
_NUMBER_LISTS = re.compile(
    r"(^|_)(emb|embs|embedding|embeddings|vec|vector|score|scores|weights|prices|dense|values|ratings|times|timestamps|ts|time|timestamp"
    r"|durations|distances)$"
)
_HISTORIES = re.compile(r"(^|_)(hist|history|clicked|click|viewed|view|recent|past|bought|seq|sequence|list|last|ids)(?=_|$)")

_SEPARATORS = ("|", ";", ",", " ")
# Numbers below it, as 2 for the second, are no times of an event unless the column says nothing but `time`.
_EPOCH = 100_000_000
# In the place of a separator.
_NO_LIST = ""


def plain_name(name: str) -> str:
    """A name as the rules read it: `userId`, `User ID` and `user_id:token` are `user_id`."""
    name = re.sub(r":(token|token_seq|float|float_seq)$", "", name.strip())
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") if re.search("[a-zA-Z0-9]", name) else name


@dataclass
class _Found:
    """What the values of a column are: counts of rows, over all of them."""

    name: str
    plain: str
    form: str
    inner: str | None
    numbers: dict[str, Any]

    def __getitem__(self, what: str) -> Any:
        return self.numbers.get(what) or 0

    def mostly(self, what: str, share: float = 0.5) -> bool:
        return bool(self["present"] and self[what] >= share * self["present"])

    @property
    def is_number(self) -> bool:
        """Whether it is one, up to odd values: where some have fractions few need be, for words among whole numbers are ids."""
        if self.form != "text":
            return self.form in ("whole", "unsigned", "float", "decimal", "bool")
        return self.mostly("numeric", 0.5 if self["fractions"] else 0.9) and not self["padded"]

    @property
    def is_whole(self) -> bool:
        return self.is_number and not self["fractions"]

    @property
    def is_binary(self) -> bool:
        return self.form == "bool" or bool(self["present"] and self["binary"] == self["present"])


def infer(table: Table, lists: Iterable[str] = (), told: Iterable[str] = ()) -> Schema:
    """The kind of every column of a table, from types, names and values of all rows.

    Args:
        table: an open table.
        lists: columns that hold lists of ids, whatever their values look like.
        told: columns of which the user says what they are for.

    Raises:
        DataError: the table has no rows, whose values say nothing; or numbers with a decimal comma, which would be lists of two.
    """
    if not table.num_rows:
        raise refuse(table.name, "a table without rows", "rows")
    found = _looked_at(table)
    _refuse_decimal_commas(table, found, {*lists, *told})
    separators = {one.name: _list_separator(one, one.name in set(lists)) for one in found if one.form == "text"}
    columns = {one.name: _alone(one, table, separators.get(one.name, _NO_LIST)) for one in found}
    is_list = {name for name, column in columns.items() if column.kind in (Kind.IDS, Kind.NUMBERS)}
    by_name = {one.plain: one for one in reversed(found) if one.form != "other" and one.name not in is_list}
    taken: set[str] = set()

    def choose(kind: Kind, names: Sequence[str], fits: Any = lambda one: True) -> str | None:
        for name in names:
            one = by_name.get(name)
            if one is not None and one.name not in taken and fits(one):
                taken.add(one.name)
                columns[one.name] = Column(one.name, kind)
                return one.name
        return None

    is_id = lambda one: one.form != "calendar" and (one.is_whole or not one.is_number)  # noqa: E731
    user = choose(Kind.USER, _USERS, is_id)
    # Without users a session is what has a history.
    user = user or choose(Kind.USER, ("session_id", "sessionid", "session"), is_id)
    candidate = choose(Kind.CANDIDATE, _CANDIDATES, is_id)
    choose(Kind.REQUEST, _REQUESTS, is_id)
    choose(Kind.WEIGHT, _WEIGHTS, lambda one: one.is_number)
    choose(Kind.EVENT, _EVENTS, is_id)
    times = [one for one in found if one.plain not in _TIMES and _ELAPSED.search(one.plain)]
    others = [one for one in found if one.form == "calendar" or one.mostly("calendar", 0.9) or one.mostly("dates", 0.9)]
    if choose(Kind.TIME, [*_TIMES, *(one.plain for one in [*times, *others])], _is_time):
        # The others tell the same in another way.
        for one in found:
            if one.plain in _TIMES and columns[one.name].kind is Kind.NUMBER:
                columns[one.name] = Column(one.name, Kind.UNUSED)
    labels = [one for one in found if one.name not in taken and _is_label(one)]
    for one in labels or [one for one in found if one.name not in taken and one.plain.startswith("is_") and one.is_binary]:
        columns[one.name] = Column(one.name, Kind.LABEL)
    shared = _histories(found, columns, candidate)
    return Schema(tuple(shared.get(name, column) for name, column in columns.items()))


def schema_for(table: Table, schema: Schema | None = None, **words: Any) -> Schema:
    """The schema of a table: the one given, else what is inferred, with the user's words.

    Columns that a given schema does not name are unused. Its separators are for text.

    Raises:
        DataError: the schema or a word names a column that is not there, or a kind that its type cannot hold.
    """
    history = words.get("history") or ()
    if schema is None:
        named = [name for value in words.values() for name in ([value] if isinstance(value, str) else value or ())]
        schema = infer(table, [history] if isinstance(history, str) else history, named)
    else:
        for name in schema.names:
            if name not in table.types:
                raise refuse("schema", f"the column {shown(name)}", f"those of {table.name}: {shown(list(table.types), 200)}")
        # What a schema says of text does not matter where lists are lists.
        told = {
            one.name: dataclasses.replace(one, separator=None) if is_list(table.types[one.name]) else one
            for one in schema.columns
        }
        schema = Schema(tuple(told.get(name, Column(name, Kind.UNUSED)) for name in table.types))
    schema = schema.with_words(**words)
    for column in schema.columns:
        value_sql(column, table.types[column.name])
    return schema


def events_schema_for(table: Table, schema: Schema | None, rows: Schema, words: dict[str, Any]) -> Schema:
    """The schema of an event table that stands beside rows, whose ids it shares.

    Where none is given, columns that are called as the rows' user, candidate, time or event type are of these kinds.

    Raises:
        DataError: as of `schema_for`, with the word's place.
    """
    if schema is None:
        named = {name for value in words.values() for name in ([value] if isinstance(value, str) else value or ())}
        for kind in (Kind.USER, Kind.CANDIDATE, Kind.TIME, Kind.EVENT):
            column = rows.one(kind)
            if column is not None and column.name in table.types and column.name not in named:
                words.setdefault(kind.value, column.name)
    return beside(schema_for(table, schema, **words), rows)


def _refuse_decimal_commas(table: Table, found: list[_Found], told: set[str]) -> None:
    """Refuse texts that are all two numbers with a comma between, unless the name or the user says that they are lists."""
    for one in found:
        is_named = one.name in told or _LISTS_OF_IDS.search(one.plain)
        if one["decimal_commas"] and one["decimal_commas"] == one["present"] and not is_named:
            column = identifier(one.name)
            ((example,),) = table.sql(f"SELECT min(trim({column})) FILTER (contains({column}, ',')) FROM {table.rows}")
            cure = f"write it with a point, or say what {one.name} is: ids for a list of two ids, numbers, or unused"
            raise refuse(
                table.name, f"a decimal comma in the column {shown(one.name)}: {shown(example)}", "a decimal point", cure
            )


def _looked_at(table: Table) -> list[_Found]:
    """What all values of each column are; a query for each, which is faster than one for all."""
    result = []
    for name, kind in table.types.items():
        inner = element(kind)
        one = _Found(name, plain_name(name), form(kind), None if inner is None else form(inner), {})
        result.append(one)
        if questions := _questions(one):
            rows = f"SELECT {identifier(name)} AS x FROM {table.rows}"
            if one.form == "text":
                text = f"trim({identifier(name)})"
                # Of the table's kinds, numbers have the most words for what is missing.
                missing = missing_sql(Column(name, Kind.NUMBER), kind)
                asked = f"{identifier(name)} AS x, {text} AS t, TRY_CAST({text} AS DOUBLE) AS d, {missing} AS m"
                rows = f"SELECT {asked} FROM {table.rows}"
            (answers,) = table.sql(f"SELECT {', '.join(questions.values())} FROM ({rows})")
            one.numbers.update(zip(questions, answers, strict=True))
    return result


def _questions(one: _Found) -> dict[str, str]:
    """What is asked of all values `x` of a column, as SQL; of text `t` without blanks, its number `d`, missing `m`."""
    present = {"present": "count(x)", "distinct": "approx_count_distinct(x)"}
    if one.form == "text":
        # What a cast takes for a number, of which it takes too much: words as `inf`, 0x10 and 1_000. Patterns are slow, so they
        # come last in a condition.
        whole = "d IS NOT NULL AND NOT contains(t, '.')"
        number_list = "|".join(f"-?[0-9]+(?:{between}-?[0-9]+)+" for between in (" +", ";", ",", r"\|"))
        tests = {
            "present": "NOT m",
            "numeric": f"d IS NOT NULL AND NOT m AND regexp_full_match(t, '{DECIMAL}')",
            "fractions": "d IS NOT NULL AND contains(t, '.') AND NOT m",
            "padded": f"{whole} AND starts_with(t, '0') AND strlen(t) > 1",
            "long": f"{whole} AND abs(d) > {2**53}",
            "binary": "d IN (0, 1) OR (strlen(t) IN (4, 5) AND lower(t) IN ('true', 'false'))",
            "calendar": f"d IS NULL AND contains(t, '-') AND regexp_full_match(t, '{CALENDAR}')",
            "dates": f"d IS NULL AND regexp_full_match(t, '{OTHER_DATES}')",
            "epochs": f"d BETWEEN {_EPOCH} AND 1e19",
            "brackets": "d IS NULL AND starts_with(t, '[') AND ends_with(t, ']')",
            **{separator: f"d IS NULL AND contains(t, '{separator}')" for separator in _SEPARATORS},
            "number_lists": f"d IS NULL AND regexp_full_match(t, '{number_list}')",
            "decimal_commas": "d IS NULL AND contains(t, ',') AND regexp_full_match(t, '-?[0-9]+,[0-9]+')",
        }
        return {"distinct": present["distinct"]} | {what: f"count(*) FILTER ({test})" for what, test in tests.items()}
    if one.form in ("whole", "unsigned", "decimal"):
        whole = "count(*) FILTER (x <> trunc(x))" if one.form == "decimal" else "0"
        return {
            **present,
            "fractions": whole,
            "long": f"count(*) FILTER (x NOT BETWEEN -{2**53} AND {2**53})",
            "binary": "count(*) FILTER (x IN (0, 1))",
            "epochs": f"count(*) FILTER (x >= {_EPOCH})",
        }
    if one.form == "float":
        return {
            "present": "count(*) FILTER (NOT isnan(x))",
            "distinct": present["distinct"],
            "fractions": "count(*) FILTER (isfinite(x) AND x <> trunc(x))",
            "binary": "count(*) FILTER (x IN (0, 1))",
            "epochs": f"count(*) FILTER (isfinite(x) AND x >= {_EPOCH})",
        }
    return present if one.form in ("bool", "calendar") else {}


def _list_separator(one: _Found, is_told: bool) -> str | None:
    """What stands between the values of lists in a text column; None for brackets around them, `_NO_LIST` where it holds none."""
    if one.mostly("brackets"):
        return None
    of_ids = is_told or bool(_LISTS_OF_IDS.search(one.plain))
    is_named = of_ids or bool(_LISTS_OF_WORDS.search(one.plain))
    if one.mostly("calendar") or one.mostly("dates") or (one.mostly("numeric") and not is_named):
        return _NO_LIST
    if one.mostly("number_lists"):
        return max(_SEPARATORS, key=lambda separator: one[separator])
    possible = [separator for separator in _SEPARATORS if is_named and one[separator] and (of_ids or separator != " ")]
    # In texts of other names a stroke is one more sign between words.
    possible = possible or ["|"] * (one.mostly("|", 0.2) and one[" "] < one["|"])
    often = [separator for separator in possible if one.mostly(separator, 0.2)]
    # Who says that there are lists means those of one value each where nothing separates them.
    return next(iter([*often, *possible]), "|" if is_told else _NO_LIST)


def _alone(one: _Found, table: Table, separator: str | None) -> Column:
    """The kind of a column by itself."""
    if one.form == "text" and separator != _NO_LIST:
        return Column(one.name, _kind_of_lists(one, table, separator), separator=separator)
    if one.form == "list":
        if one.inner in ("list", "other", "calendar"):
            return Column(one.name, Kind.UNUSED)
        is_number = one.inner in ("float", "decimal") or (one.inner != "text" and _NUMBER_LISTS.search(one.plain))
        return Column(one.name, Kind.NUMBERS if is_number else Kind.IDS)
    if one.form == "other":
        return Column(one.name, Kind.UNUSED)
    if (one.plain in _ROW_NUMBERS or one.plain.startswith("unnamed_")) and _is_row_number(one, table):
        return Column(one.name, Kind.UNUSED)
    # A time that is not the row's own is no number to learn from.
    if (
        one.form == "calendar"
        or one.mostly("calendar", 0.9)
        or one.mostly("dates", 0.9)
        or (_ELAPSED.search(one.plain) and _is_epoch(one))
    ):
        return Column(one.name, Kind.UNUSED)
    if one.form == "bool" or not one.is_number or (one.form == "text" and not table.is_text and one.is_whole):
        return Column(one.name, Kind.ID)
    if not one.is_whole:
        return Column(one.name, Kind.NUMBER)
    # Larger numbers than a float holds are hashes.
    is_id = one["long"] or _IDS.search(one.plain) or one.plain in (*_USERS, *_CANDIDATES, *_REQUESTS)
    is_category = _CATEGORIES.search(one.plain) and one["distinct"] <= _CATEGORICAL_VALUES
    return Column(one.name, Kind.ID if is_id or is_category else Kind.NUMBER)


def _kind_of_lists(one: _Found, table: Table, separator: str | None) -> Kind:
    """Numbers where elements have fractions or the name says so, else ids."""
    texts = texts_sql(identifier(one.name), separator)
    of_number = f"regexp_full_match(trim(value), '{DECIMAL}')"
    ((values, numeric, fractions),) = table.sql(
        f"SELECT count(value), count(*) FILTER ({of_number}), count(*) FILTER ({of_number} "
        f"AND NOT regexp_full_match(trim(value), '{WHOLE}'))"
        f" FROM (SELECT unnest({texts}) AS value FROM {table.rows})"
    )
    is_number = values and numeric >= 0.9 * values
    return Kind.NUMBERS if is_number and (fractions or _NUMBER_LISTS.search(one.plain)) else Kind.IDS


def _is_row_number(one: _Found, table: Table) -> bool:
    if one["distinct"] < 0.8 * table.num_rows or table.num_rows < 2:
        return False
    ((distinct,),) = table.sql(f"SELECT count(DISTINCT {identifier(one.name)}) FROM {table.rows}")
    return bool(distinct == table.num_rows)


def _is_epoch(one: _Found) -> bool:
    return one.is_number and one.form != "bool" and one.mostly("epochs")


def _is_time(one: _Found) -> bool:
    # Dates that are not written as they should be are times all the same, which are then refused with what to do.
    if one.form == "calendar" or one.mostly("calendar") or one.mostly("dates"):
        return True
    if one.plain in _TIMES:
        # Steps, days and other numbers will do where the name leaves no doubt.
        return (one.is_number or one.mostly("numeric")) and one.form not in ("bool", "decimal")
    return _is_epoch(one) and one.form != "decimal"


def _is_label(one: _Found) -> bool:
    if one.plain in _LABELS or one.plain.startswith(("label_", "target_")):
        return one.is_number
    stem = one.plain.removeprefix("is_")
    ends = re.search(r"(^|_)(label|target|click|clicked|purchase|purchased|conversion|converted|liked)$", stem)
    return one.is_binary and bool(stem in _ACTIONS or ends)


def _histories(found: list[_Found], columns: dict[str, Column], candidate: str | None) -> dict[str, Column]:
    """The lists whose names say that they hold candidates: they share the candidates' table."""
    if candidate is None:
        return {}
    item = re.sub("_?id$", "", plain_name(candidate)) or "item"
    result = {}
    for one in found:
        column = columns[one.name]
        if column.kind is Kind.IDS and _HISTORIES.search(one.plain):
            rest = _HISTORIES.sub("", one.plain).strip("_")
            if re.fullmatch(rf"(user_?)?({item}|item)?s?(_?ids?)?|user", rest):
                result[one.name] = Column(one.name, Kind.IDS, table=candidate, separator=column.separator)
    return result
