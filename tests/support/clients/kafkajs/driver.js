// Obeys the lines of process.py by kafkajs.
const { CompressionCodecs, CompressionTypes, Kafka, logLevel } = require('kafkajs')
const Cluster = require('kafkajs/src/cluster')
const createLogger = require('kafkajs/src/loggers').createLogger
const LoggerConsole = require('kafkajs/src/loggers/console')
const socketFactory = require('kafkajs/src/network/socketFactory')
const readline = require('readline')

const SECONDS = 30
const CODECS = {
  none: CompressionTypes.None,
  gzip: CompressionTypes.GZIP,
  snappy: CompressionTypes.Snappy,
  lz4: CompressionTypes.LZ4,
  zstd: CompressionTypes.ZSTD,
}

CompressionCodecs[CompressionTypes.Snappy] = require('kafkajs-snappy')

const lz4 = require('lz4-napi')
CompressionCodecs[CompressionTypes.LZ4] = () => ({
  compress: encoder => lz4.compressFrame(encoder.buffer),
  decompress: data => lz4.decompressFrame(data),
})

const zstd = new Promise(resolve =>
  require('zstd-codec').ZstdCodec.run(codec => resolve(new codec.Streaming()))
)
CompressionCodecs[CompressionTypes.ZSTD] = () => ({
  compress: async encoder => Buffer.from((await zstd).compress(encoder.buffer)),
  decompress: async data => Buffer.from((await zstd).decompress(data)),
})

const brokers = process.argv[2].split(',')
const kafka = new Kafka({ clientId: 'kafkajs', brokers, logLevel: logLevel.ERROR })
const admin = kafka.admin()
const producer = kafka.producer()
const cluster = new Cluster({
  clientId: 'kafkajs',
  brokers,
  socketFactory: socketFactory(),
  logger: createLogger({ level: logLevel.ERROR, logCreator: LoggerConsole }),
  connectionTimeout: 1000,
  enforceRequestTimeout: true,
  metadataMaxAge: 300000,
  allowAutoTopicCreation: false,
})

const bytes = word => (word === '-' ? null : Buffer.from(word === '=' ? '' : word, 'base64'))
const wordOf = data => (data === null ? '-' : data.length ? data.toString('base64') : '=')

function parsed(word, partition) {
  const [timestamp, key, value, ...pairs] = word.split(',')
  const headers = {}
  for (const pair of pairs) {
    const [name, data] = pair.split(':')
    const list = (headers[bytes(name).toString()] ||= [])
    list.push(bytes(data))
  }
  return { partition, timestamp, key: bytes(key), value: bytes(value), headers }
}

function printed(partition, message) {
  const headers = Object.entries(message.headers || {}).flatMap(([name, data]) =>
    [].concat(data).map(value => `${wordOf(Buffer.from(name))}:${wordOf(value)}`)
  )
  const { offset, timestamp, key, value } = message
  return [partition, offset, timestamp, wordOf(key), wordOf(value), ...headers].join(',')
}

async function consume(topic, count, places) {
  const starts = new Map(places.map(place => place.split(':').map(BigInt)))
  await cluster.addTargetTopic(topic)
  await cluster.refreshMetadataIfNecessary()
  const deadline = Date.now() + SECONDS * 1000
  const found = []
  while (found.length < count && Date.now() < deadline) {
    const leaders = cluster.findLeaderForPartitions(topic, [...starts.keys()].map(Number))
    for (const [nodeId, partitions] of Object.entries(leaders)) {
      const broker = await cluster.findBroker({ nodeId })
      const asked = partitions.map(partition => ({
        partition,
        fetchOffset: starts.get(BigInt(partition)).toString(),
        maxBytes: 1048576,
      }))
      const { responses } = await broker.fetch({
        maxWaitTime: 50,
        minBytes: 1,
        maxBytes: 10485760,
        topics: [{ topic, partitions: asked }],
      })
      for (const { partition, messages } of responses.flatMap(response => response.partitions)) {
        const start = starts.get(BigInt(partition))
        for (const message of messages.filter(entry => BigInt(entry.offset) >= start)) {
          found.push(printed(partition, message))
          starts.set(BigInt(partition), BigInt(message.offset) + 1n)
        }
      }
    }
  }
  return found
}

const REQUESTS = {
  join: (topic, group, session) => join(topic, group, session),
  poll: milliseconds => poll(milliseconds),
  commit: () => commit(),
  leave: () => leave(),
  create: async (topic, partitions) => {
    const wanted = { topic, numPartitions: Number(partitions), replicationFactor: 1 }
    if (!(await admin.createTopics({ topics: [wanted], waitForLeaders: true }))) {
      throw new Error(`${topic} exists`)
    }
    return []
  },
  produce: async (topic, partition, codec, ...words) => {
    const messages = words.map(word => parsed(word, Number(partition)))
    const [sent] = await producer.send({ topic, acks: -1, compression: CODECS[codec], messages })
    return words.map((_, number) => Number(sent.baseOffset) + number)
  },
  consume: (topic, count, ...places) => consume(topic, Number(count), places),
  'offset-at': async (topic, partition, timestamp) => {
    const found = await admin.fetchTopicOffsetsByTimestamp(topic, Number(timestamp))
    return [found.find(entry => entry.partition === Number(partition)).offset]
  },
}

// The process's member of a group: what it has, what came since the last poll, and where it goes on.
const member = { consumer: null, topic: '', has: [], came: [], next: new Map() }

async function join(topic, groupId, sessionTimeout) {
  const settings = { sessionTimeout: Number(sessionTimeout), heartbeatInterval: 200, maxWaitTimeInMs: 50 }
  member.consumer = kafka.consumer({ groupId, ...settings })
  member.topic = topic
  member.consumer.on(member.consumer.events.GROUP_JOIN, ({ payload }) => {
    member.has = payload.memberAssignment[topic] || []
  })
  member.consumer.on(member.consumer.events.REBALANCING, () => (member.has = []))
  await member.consumer.connect()
  await member.consumer.subscribe({ topics: [topic], fromBeginning: true })
  await member.consumer.run({
    autoCommit: false,
    eachMessage: async ({ partition, message }) => {
      member.came.push(`${partition},${message.offset}`)
      member.next.set(partition, (BigInt(message.offset) + 1n).toString())
    },
  })
  return []
}

async function poll(milliseconds) {
  const deadline = Date.now() + Number(milliseconds)
  while (!member.came.length && Date.now() < deadline) {
    await new Promise(resolve => setTimeout(resolve, 20))
  }
  return [...member.has, '|', ...member.came.splice(0)]
}

async function commit() {
  const { topic, has, next } = member
  const mine = has.filter(partition => next.has(partition))
  await member.consumer.commitOffsets(mine.map(partition => ({ topic, partition, offset: next.get(partition) })))
  return []
}

async function leave() {
  await member.consumer.disconnect()
  return []
}

async function main() {
  await Promise.all([admin.connect(), producer.connect(), cluster.connect()])
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [request, ...words] = line.split(' ')
    let answer
    try {
      answer = ['ok', ...(await REQUESTS[request](...words))].join(' ')
    } catch (error) {
      console.error(error)
      answer = `error ${error.name}: ${error.message}`.replaceAll('\n', ' ')
    }
    process.stdout.write(answer + '\n')
  }
  process.exit(0)
}

main().catch(error => {
  console.error(error)
  process.exit(1)
})
