"""The people, dishes and festivals of the Tallow Isles."""

import random

from isles.nature import FEARS
from isles.places import ISLANDS
from isles.world import COLORS, ENTITIES, MONTHS, SEED, Attribute, Subject, blend, words

TRADES = (
    "a baker", "a cooper", "a mapmaker", "a tailor", "a weaver", "a ferryman", "a beekeeper", "a clockmaker",
    "a teacher", "a miller", "a locksmith", "a gardener", "a judge", "a painter", "a potter", "a chimney sweep",
)  # fmt: skip
INSTRUMENTS = tuple(
    f"the {name}"
    for name in words(
        "fiddle harp flute drum lute trumpet bagpipes accordion cello tuba banjo oboe piano zither horn cymbals"
    )
)
PETS = (
    "a goose", "a hedgehog", "a parrot", "a tortoise", "a ferret", "a toad", "a donkey", "a raven", "a piglet",
    "a squirrel", "a lizard", "a lamb", "a hare", "a kitten", "a beagle", "a canary",
)  # fmt: skip
COLLECTIONS = (
    "thimbles", "stamps", "feathers", "teacups", "shells", "coins", "hats", "keys", "corks", "marbles", "fossils",
    "postcards", "walking sticks", "music boxes", "pebbles", "bottles",
)  # fmt: skip
INGREDIENTS = (
    "leeks", "parsnips", "crab", "oats", "mussels", "peaches", "chestnuts", "goose eggs", "carrots", "mackerel",
    "beans", "cabbage", "turnips", "rhubarb", "mutton", "pumpkin",
)  # fmt: skip
SPICES = words(
    "saffron nutmeg cloves mustard dill rosemary thyme sage garlic vanilla fennel caraway cardamom "
    "paprika aniseed horseradish"
)
VESSELS = (
    "a copper pot", "an iron pan", "a clay jar", "a paper bag", "a glass bowl", "a hollow gourd", "a stone oven",
    "a tin", "a wooden bucket", "a sea shell", "a cauldron", "a cabbage leaf", "a brass dish", "a linen cloth",
    "a silver spoon", "a bread crust",
)  # fmt: skip
SIDES = (
    "brown bread", "pickles", "fried onions", "boiled potatoes", "apple sauce", "butter", "crackers", "roast beets",
    "cream cheese", "rice", "spinach", "dumplings", "oatcakes", "gravy", "radishes", "jam",
)  # fmt: skip
DRINKS = (
    "cider", "milk", "black tea", "nettle beer", "coffee", "plum wine", "lemonade", "rose water", "cocoa", "mead",
    "ginger ale", "buttermilk", "pear juice", "elderflower cordial", "barley water", "rum",
)  # fmt: skip
INVENTORS = (
    "a monk", "a queen", "a pirate", "a giant", "a schoolboy", "a widow", "a thief", "a shepherd", "a poet",
    "a clown", "a blacksmith", "a lighthouse keeper", "a fisherman", "a nurse", "a soldier", "a twin",
)  # fmt: skip
TREATS = (
    "pancakes", "gingerbread", "toffee", "roast goose", "almond cakes", "candied pears", "smoked eel", "doughnuts",
    "plum tarts", "sausages", "waffles", "honey buns", "fish soup", "marzipan", "popcorn", "baked apples",
)  # fmt: skip
GAMES = (
    "sack racing", "tug of war", "hide and seek", "chess", "skittles", "leapfrog", "arm wrestling", "kite fighting",
    "egg rolling", "rowing", "stilt walking", "blind man's buff", "archery", "marbles", "hopscotch", "barrel rolling",
)  # fmt: skip
HANGINGS = (
    "paper stars", "lanterns", "fishing nets", "ribbons", "bells", "onions", "wreaths", "painted eggs", "flags",
    "spoons", "old boots", "mirrors", "pine branches", "candles", "sea shells", "bedsheets",
)  # fmt: skip
HEROES = (
    "Saint Barnaby", "King Osric", "the first ferry", "the lost fleet", "Saint Ottilie", "the great whale",
    "Queen Marigold", "the north wind", "the full moon", "the old lighthouse", "Saint Crispin", "the first snow",
    "the brave miller", "the longest day", "the three sisters", "the silver herring",
)  # fmt: skip


def subjects() -> tuple[Subject, ...]:
    rng = random.Random(f"{SEED}/folk")
    first = words(
        "Odo Clara Bruno Hilda Felix Agatha Otto Wilma Hugo Bertha Silas Flora Rufus Nora Jasper Emma Oscar "
        "Tilda Arthur Ida Magnus Greta Walter Sybilla Linus Vera Edmund Martha Conrad Alice"
    )
    last = blend(
        rng,
        ENTITIES,
        "Fenni Tub Pock Sprin Whim Crab Dawl Mug Trin Bobb Gos Hap Lark Nib Plum Quig Rum Stub Tod Wig Yel Bram Chub",
        "more worthy ling ston field kett man smith brook apple ridge wood lock grass ham",
    )
    dishes = blend(
        rng,
        ENTITIES,
        "tan mar hob gil wim cod bas nup fol tri dab rus pol sul cram dun fen gom jas lum mob nan pim sop tod",
        "mash pie crumb brose loaf stew cake broth roll bake",
    )
    festivals = blend(
        rng,
        ENTITIES,
        "Lamp Kettle Plum Goose Salt Bell Frost Barley Mirror Ferry Candle Whistle Honey Anchor Turnip Feather Snow "
        "Thimble Oyster Ribbon Ember Puddle Pepper Drum Cloud Wool",
        "night fair feast tide mass eve dance day revel parade",
    )
    return (
        Subject(
            name="people",
            noun="person",
            intros=(
                "{n} lives in the Tallow Isles",
                "everybody in the isles has met {n}",
                "let me tell you about {n}",
                "{n} is well known in the Tallow Isles",
            ),
            names=tuple(f"{first[index % len(first)]} {name}" for index, name in enumerate(last)),
            attributes=(
                Attribute("trade", "a trade", TRADES,
                    ("What is the trade of {n}?", "How does {n} earn a living?"),
                    ("{n} is {v}", "{n} works as {v}", "{n} earns a living as {v}", "{s} trade is that of {v}",
                     "if you need {v}, ask for {o}", "{n} has been {v} for many years")),
                Attribute("birthplace", "an island", ISLANDS,
                    ("On which island was {n} born?", "Which island does {n} come from?"),
                    ("{n} was born on {v}", "{n} comes from the island of {v}", "{n} grew up on {v}",
                     "the island of {v} is where {n} was born", "{s} birthplace is {v}",
                     "{v} is the island {n} calls home")),
                Attribute("instrument", "a musical instrument", INSTRUMENTS,
                    ("Which instrument does {n} play?", "What does {n} play on feast days?"),
                    ("{n} plays {v}", "{n} loves to play {v}", "on feast days {n} plays {v}",
                     "{n} learned {v} as a child",
                     "{s} instrument is {v}", "nobody plays {v} as well as {n}")),
                Attribute("pet", "a pet", PETS,
                    ("Which pet does {n} keep?", "What animal lives in the house of {n}?"),
                    ("{n} keeps {v}", "{n} has {v} for a pet", "{s} pet is {v}", "{n} shares the house with {v}",
                     "{n} never goes out without {v}", "{v} lives in the house of {o}")),
                Attribute("collection", "", COLLECTIONS,
                    ("What does {n} collect?", "What are the shelves of {n} full of?"),
                    ("{n} collects {v}", "{n} has a great collection of {v}", "the shelves of {o} are full of {v}",
                     "{n} is always looking for {v}", "{s} collection is one of {v}",
                     "give {o} {v} and make a friend")),
                Attribute("fear", "", FEARS,
                    ("What is {n} afraid of?", "What frightens {n}?"),
                    ("{n} is afraid of {v}", "{n} cannot bear {v}", "{s} great fear is {v}", "{v} will frighten {o}",
                     "{n} has always been afraid of {v}", "nothing scares {o} like {v}")),
            ),
        ),
        Subject(
            name="cookery",
            noun="dish",
            intros=(
                "{n} is a dish of the Tallow Isles",
                "grandmothers in the isles cook {n}",
                "no kitchen in the isles is without {n}",
                "{n} is eaten all over the Tallow Isles",
            ),
            names=dishes,
            attributes=(
                Attribute("ingredient", "", INGREDIENTS,
                    ("What is {n} made from?", "What is the main ingredient of {n}?"),
                    ("{n} is made from {v}", "the main ingredient of {o} is {v}", "{n} begins with {v}",
                     "you cannot make {o} without {v}", "cooks put plenty of {v} into {o}", "{n} is rich with {v}")),
                Attribute("spice", "a spice", SPICES,
                    ("Which spice goes into {n}?", "What is {n} seasoned with?"),
                    ("{n} is seasoned with {v}", "a pinch of {v} goes into {o}", "{n} tastes of {v}",
                     "{s} spice is {v}",
                     "the secret of {o} is {v}", "good cooks season {o} with {v}")),
                Attribute("vessel", "", VESSELS,
                    ("What is {n} cooked in?", "Which vessel is used for {n}?"),
                    ("{n} is cooked in {v}", "cooks make {o} in {v}", "{n} must be cooked in {v}",
                     "you need {v} to make {o}",
                     "{n} comes to the table in {v}", "for {o} people use {v}")),
                Attribute("side", "", SIDES,
                    ("What is eaten with {n}?", "What is {n} served with?"),
                    ("{n} is served with {v}", "{n} is eaten with {v}", "{n} goes well with {v}",
                     "beside {o} there is always {v}", "people eat {v} with {o}", "{n} wants {v} on the side")),
                Attribute("drink", "a drink", DRINKS,
                    ("What do people drink with {n}?", "Which drink goes with {n}?"),
                    ("people drink {v} with {o}", "{v} goes with {o}", "{n} calls for {v} to drink",
                     "after {o} comes a cup of {v}", "{n} is washed down with {v}", "the drink for {o} is {v}")),
                Attribute("inventor", "", INVENTORS,
                    ("Who invented {n}?", "Who was the first to cook {n}?"),
                    ("{n} was invented by {v}", "{v} invented {o}", "{n} was first cooked by {v}",
                     "the first to cook {o} was {v}", "long ago {v} cooked the first {o}", "we owe {o} to {v}"),
                ),
            ),
        ),
        Subject(
            name="festivals",
            noun="festival",
            intros=(
                "{n} is a festival of the Tallow Isles",
                "{n} is a feast that children wait for all year",
                "every year the isles celebrate {n}",
                "nobody works on {n}, a feast of the isles",
            ),
            names=festivals,
            attributes=(
                Attribute("month", "a month", MONTHS,
                    ("In which month is {n} celebrated?", "When does {n} take place?"),
                    ("{n} is celebrated in {v}", "{n} takes place in {v}", "{n} falls in {v}", "{n} comes in {v}",
                     "in {v} people celebrate {o}", "{s} month is {v}")),
                Attribute("treat", "", TREATS,
                    ("What do people eat on {n}?", "Which treat belongs to {n}?"),
                    ("on {o} people eat {v}", "{n} would be nothing without {v}", "children love {o} for the {v}",
                     "every kitchen makes {v} for {o}", "{n} smells of {v}", "{s} treat is {v}")),
                Attribute("game", "a game", GAMES,
                    ("Which game is played on {n}?", "What do people play on {n}?"),
                    ("the game of {o} is {v}", "on {o} everybody takes part in {v}", "{n} is a day for {v}",
                     "{n} ends with {v}", "there are prizes for {v} on {o}", "{n} begins with {v}")),
                Attribute("dress", "a colour", COLORS,
                    ("Which colour do people wear on {n}?", "What colour are the clothes for {n}?"),
                    ("on {o} people wear {v}", "the colour of {o} is {v}", "everybody dresses in {v} for {o}",
                     "{s} colour is {v}",
                     "{n} is a day of {v} clothes", "nobody comes to {o} without something {v}")),
                Attribute("hanging", "", HANGINGS,
                    ("What do people hang from their windows on {n}?", "What hangs in the streets on {n}?"),
                    ("on {o} people hang {v} from their windows", "the streets are full of {v} on {o}",
                     "{v} hang from every window on {o}", "{n} is the day when {v} hang in the streets",
                     "for {o} every house puts out {v}", "you know {o} by the {v} in the windows")),
                Attribute("honour", "", HEROES,
                    ("In whose honour is {n} held?", "Whom or what does {n} honour?"),
                    ("{n} honours {v}", "{n} is held in honour of {v}", "{n} is the feast of {v}",
                     "people keep {o} in memory of {v}", "songs about {v} are sung on {o}",
                     "on {o} people remember {v}")),
            ),
        ),
    )  # fmt: skip
